// Command lines: "--flag value" or "--flag=value".
#pragma once

#include <charconv>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <locale>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace toy {

/// Something the user can mend; one line.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string in_quotes(std::string_view text) { return "'" + std::string(text) + "'"; }

/// Goes through the arguments one flag at a time:
///   while (arguments.next())
///     if (arguments.is_switch("--help")) ... else if (arguments.is("--steps")) steps = arguments.integer(1, 100); else arguments.unknown();
/// All members throw UsageError.
class Arguments {
 public:
  /// @param arguments  without the program's name
  explicit Arguments(std::span<const char* const> arguments) : left_(arguments) {}

  bool next() {
    if (left_.empty()) return false;
    argument_ = left_.front();
    left_ = left_.subspan(1);
    const std::size_t equals = argument_.starts_with("--") ? argument_.find('=') : std::string_view::npos;
    has_value_ = equals != std::string_view::npos;
    flag_ = argument_.substr(0, equals);
    value_ = has_value_ ? argument_.substr(equals + 1) : std::string_view{};
    return true;
  }

  bool is(std::string_view flag) const { return flag_ == flag; }
  bool is_switch(std::string_view flag) const {
    if (is(flag) && has_value_) throw UsageError(std::string(flag) + " takes no value");
    return is(flag);
  }

  std::string text() {
    if (has_value_) return std::string(value_);
    if (left_.empty()) throw UsageError(std::string(flag_) + " needs a value");
    const std::string value = left_.front();
    left_ = left_.subspan(1);
    return value;
  }
  template <class Integer = std::int64_t>
  Integer integer(Integer least, Integer greatest = std::numeric_limits<Integer>::max()) {
    const std::string value = text();
    Integer number{};
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error == std::errc::invalid_argument || end != value.data() + value.size()) fail(in_quotes(value) + " is not a whole number");
    if (error != std::errc{} || number < least || number > greatest) fail(value + " is not in " + std::to_string(least) + " to " + std::to_string(greatest));
    return number;
  }
  double number(double least, double greatest) {
    const std::string value = text();
    std::istringstream stream{value};  // std::from_chars for double is missing from some standard libraries
    stream.imbue(std::locale::classic());
    double number = 0;
    if (!(stream >> std::noskipws >> number) || stream.peek() != std::istringstream::traits_type::eof()) fail(in_quotes(value) + " is not a number");
    if (!(number >= least && number <= greatest)) {
      std::ostringstream range;
      range << least << " to " << greatest;
      fail(value + " is not in " + range.str());
    }
    return number;
  }
  std::string choice(std::initializer_list<std::string_view> choices) {
    const std::string value = text();
    std::string all;
    for (const std::string_view choice : choices) {
      if (choice == value) return value;
      all += (all.empty() ? "" : ", ") + std::string(choice);
    }
    fail(in_quotes(value) + " is none of " + all);
  }

  [[noreturn]] void unknown() const { throw UsageError("unknown argument " + in_quotes(argument_) + ", see --help"); }

 private:
  [[noreturn]] void fail(const std::string& reason) const { throw UsageError(std::string(flag_) + ": " + reason); }

  std::span<const char* const> left_;
  std::string_view argument_, flag_, value_;
  bool has_value_ = false;
};

}  // namespace toy
