// The two kinds of JSON values that need care. Whatever shows a figure writes it with these, so that the same figure reads
// the same everywhere.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <string>
#include <string_view>

namespace toy {
namespace detail {

/// Bytes of the UTF-8 character that `bytes` begins with; 0 if it begins with none (RFC 3629, section 4).
inline std::size_t utf8_length(std::string_view bytes) {
  const auto at = [&](std::size_t i) { return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0u; };
  const unsigned lead = at(0);
  const std::size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((at(i) & 0xC0) != 0x80) return 0;
  const bool overlong = (lead == 0xE0 && at(1) < 0xA0) || (lead == 0xF0 && at(1) < 0x90);
  const bool no_character = (lead == 0xED && at(1) > 0x9F) || (lead == 0xF4 && at(1) > 0x8F);  // a surrogate; beyond U+10FFFF
  return overlong || no_character ? 0 : length;
}

}  // namespace detail

/// Any bytes, quoted: one that is no part of a UTF-8 character is shown by its number, 0xE2 as ‹E2›. Safe inside an HTML
/// <script>, as it has no '<'.
inline std::string json_string(std::string_view bytes) {
  std::string out = "\"";
  while (!bytes.empty()) {
    const std::size_t length = detail::utf8_length(bytes);
    const unsigned char first = static_cast<unsigned char>(bytes.front());
    if (length == 0) out += fmt::format("\xE2\x80\xB9{:02X}\xE2\x80\xBA", first);
    else if (first < 0x20 || first == 0x7F || first == '"' || first == '\\' || first == '<') out += fmt::format("\\u{:04x}", first);
    else out += bytes.substr(0, length);
    bytes.remove_prefix(length == 0 ? 1 : length);
  }
  return out + '"';
}

/// A whole number as it is, any other to six significant digits; null if there is no number.
inline std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  const bool whole = std::abs(value) < 1e15 && value == std::trunc(value);
  return whole ? fmt::format("{:.0f}", value) : fmt::format("{:.6g}", value);
}

}  // namespace toy
