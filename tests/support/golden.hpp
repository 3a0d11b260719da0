// Golden vectors: an index of cases, a folder each, with `case.txt` (key = value) and .npy files.
#pragma once

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "npy.hpp"

namespace test {

/// The names in `folder`/index.txt. @throws std::runtime_error when there is no index
inline std::vector<std::string> read_index(const std::filesystem::path& folder) {
  std::ifstream stream(folder / "index.txt");
  if (!stream) throw std::runtime_error((folder / "index.txt").string() + ": cannot be opened");
  std::vector<std::string> names;
  for (std::string name; stream >> name;) names.push_back(name);
  return names;
}

/// One case. Everything that is asked for and not there throws std::runtime_error and names the case.
class GoldenCase {
 public:
  explicit GoldenCase(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::ifstream stream(folder_ / "case.txt");
    if (!stream) fail("case.txt cannot be opened");
    for (std::string line; std::getline(stream, line);) {
      const auto equals = line.find(" = ");
      if (equals == std::string::npos) fail("case.txt has a line without ' = ': " + line);
      const std::string key = line.substr(0, equals), value = line.substr(equals + 3);
      constexpr std::string_view tensor = "tensor ";
      if (key.starts_with(tensor))
        tensors_[key.substr(tensor.size())] = value;
      else
        values_[key] = value;
    }
  }

  std::string name() const { return folder_.filename().string(); }
  bool has(const std::string& key) const { return values_.contains(key); }
  bool has_tensor(const std::string& name) const { return tensors_.contains(name); }

  const std::string& text(const std::string& key) const {
    const auto found = values_.find(key);
    if (found == values_.end()) fail("case.txt has no key " + key);
    return found->second;
  }
  /// `text(key)`, or `otherwise` when there is no such key.
  std::string text_or(const std::string& key, const std::string& otherwise) const {
    return has(key) ? text(key) : otherwise;
  }
  Index integer(const std::string& key) const { return parse<Index>(key, text(key)); }
  double number(const std::string& key) const { return parse<double>(key, text(key)); }
  /// "25 162" -> 25, 162. Words that are no numbers are left out.
  std::vector<Index> integers(const std::string& key) const {
    std::vector<Index> result;
    std::istringstream words(text(key));
    for (std::string word; words >> word;)
      if (word.find_first_not_of("0123456789") == std::string::npos) result.push_back(parse<Index>(key, word));
    return result;
  }

  /// `name`.npy, whose type and shape must be those that case.txt gives.
  template <NpyScalar T>
  Array<T> tensor(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail("case.txt has no tensor " + name);
    Array<T> array = read_npy<T>(folder_ / (name + ".npy"));
    std::string described(npy_name<T>());
    for (const Index length : array.shape) described += ' ' + std::to_string(length);
    if (described != found->second) fail(name + ".npy is " + described + ", case.txt says " + found->second);
    return array;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw std::runtime_error(name() + ": " + what); }

  template <class T>
  T parse(const std::string& key, const std::string& word) const {
    T value{};
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc{} || end != word.data() + word.size()) fail(key + " is not a number: " + word);
    return value;
  }

  std::filesystem::path folder_;
  std::map<std::string, std::string> values_, tensors_;
};

}  // namespace test
