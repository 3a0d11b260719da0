// Reads numpy's .npy files: format 1.0, little endian, C order, float32, int32 or uint8, and nothing else.
#pragma once

#include <Eigen/Core>
#include <bit>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace test {

using Eigen::Index;
static_assert(std::endian::native == std::endian::little, "the golden files are little endian");

template <class T>
concept NpyScalar = std::same_as<T, float> || std::same_as<T, std::int32_t> || std::same_as<T, std::uint8_t>;

/// numpy's name of T: what the header of a file says, and what `case.txt` says.
template <NpyScalar T>
constexpr std::string_view npy_descr() {
  if constexpr (std::same_as<T, float>)
    return "<f4";
  else if constexpr (std::same_as<T, std::int32_t>)
    return "<i4";
  else
    return "|u1";
}
template <NpyScalar T>
constexpr std::string_view npy_name() {
  if constexpr (std::same_as<T, float>)
    return "float32";
  else if constexpr (std::same_as<T, std::int32_t>)
    return "int32";
  else
    return "uint8";
}

/// A dense array in C order: the last index runs fastest.
template <NpyScalar T>
struct Array {
  std::vector<Index> shape;
  std::vector<T> data;

  Index rank() const { return std::ssize(shape); }
  Index dim(Index axis) const { return shape.at(static_cast<std::size_t>(axis)); }

  /// One element; needs one index per axis, each within its axis.
  template <std::same_as<Index>... Indices>
  T operator()(Indices... indices) const {
    if (sizeof...(indices) != shape.size()) throw std::out_of_range("array: wrong number of indices");
    Index offset = 0;
    Index axis = 0;
    const auto step_into = [&](Index index) {
      if (index < 0 || index >= dim(axis)) throw std::out_of_range("array: index out of range");
      offset = offset * dim(axis++) + index;
    };
    (step_into(indices), ...);
    return data[static_cast<std::size_t>(offset)];
  }
};

namespace npy_detail {

/// What follows `key` in the header, from its first character that is not a blank.
inline std::string_view value_of(std::string_view header, std::string_view key, const std::string& file) {
  const auto found = header.find(key);
  if (found == std::string_view::npos) throw std::runtime_error(file + ": the header has no " + std::string(key));
  const std::string_view rest = header.substr(found + key.size());
  return rest.substr(std::min(rest.find_first_not_of(' '), rest.size()));
}

/// "(2, 40, 40)" -> 2, 40, 40; "(7,)" -> 7; "()" -> nothing.
inline std::vector<Index> read_shape(std::string_view text, const std::string& file) {
  const auto close = text.find(')');
  if (text.empty() || text.front() != '(' || close == std::string_view::npos)
    throw std::runtime_error(file + ": the header's shape is not a tuple");
  std::vector<Index> shape;
  std::istringstream numbers{std::string(text.substr(1, close - 1))};
  for (Index number = 0; numbers >> number;) {
    if (number < 0) throw std::runtime_error(file + ": a negative length in the header's shape");
    shape.push_back(number);
    if (numbers.peek() == ',') numbers.ignore();
  }
  if (!numbers.eof()) throw std::runtime_error(file + ": the header's shape is not a list of numbers");
  return shape;
}

}  // namespace npy_detail

/// Reads a whole file. @throws std::runtime_error when it is missing, of another type or layout, or of a wrong length.
template <NpyScalar T>
Array<T> read_npy(const std::filesystem::path& path) {
  const std::string file = path.string();
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(file + ": cannot be opened");
  const std::string bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());

  constexpr std::size_t prefix = 10;  // magic (6), version (2), header length (2)
  constexpr std::string_view magic("\x93NUMPY\x01\x00", 8);
  if (bytes.size() < prefix || std::string_view(bytes).substr(0, magic.size()) != magic)
    throw std::runtime_error(file + ": not numpy format 1.0");
  const auto header_size = static_cast<std::size_t>(static_cast<unsigned char>(bytes[8])) +
                           256 * static_cast<std::size_t>(static_cast<unsigned char>(bytes[9]));
  if (bytes.size() < prefix + header_size) throw std::runtime_error(file + ": ends within its header");
  const std::string_view header = std::string_view(bytes).substr(prefix, header_size);

  const std::string descr = "'" + std::string(npy_descr<T>()) + "'";
  if (!npy_detail::value_of(header, "'descr':", file).starts_with(descr))
    throw std::runtime_error(file + ": the type is not " + std::string(npy_name<T>()));
  if (!npy_detail::value_of(header, "'fortran_order':", file).starts_with("False"))
    throw std::runtime_error(file + ": not in C order");

  Array<T> array{npy_detail::read_shape(npy_detail::value_of(header, "'shape':", file), file), {}};
  Index count = 1;
  for (const Index length : array.shape) count *= length;
  const std::string_view body = std::string_view(bytes).substr(prefix + header_size);
  if (body.size() != static_cast<std::size_t>(count) * sizeof(T))
    throw std::runtime_error(file + ": the length does not fit the header's shape");
  array.data.resize(static_cast<std::size_t>(count));
  body.copy(reinterpret_cast<char*>(array.data.data()), body.size());
  return array;
}

}  // namespace test
