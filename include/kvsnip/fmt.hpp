// Printing with fmt: sizes in bytes, what a cache holds, shapes. Opt-in.
#pragma once

#include <fmt/format.h>

#include <string>

#include "kvsnip/kv_cache.hpp"

namespace kvsnip {

/// "1.5 MiB"
inline std::string human_bytes(Index bytes) {
  constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double amount = static_cast<double>(bytes);
  int unit = 0;
  while (amount >= 1024.0 && unit < 4) amount /= 1024.0, ++unit;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", amount, units[unit]);
}

}  // namespace kvsnip

template <>
struct fmt::formatter<kvsnip::Bytes> {
  constexpr auto parse(format_parse_context& context) { return context.begin(); }
  template <class Context>
  auto format(const kvsnip::Bytes& bytes, Context& context) const {
    return fmt::format_to(context.out(), "{} (keys {}, values {}, positions {}, policy {}, scratch {})", kvsnip::human_bytes(bytes.total()),
                          kvsnip::human_bytes(bytes.keys), kvsnip::human_bytes(bytes.values), kvsnip::human_bytes(bytes.positions),
                          kvsnip::human_bytes(bytes.policy), kvsnip::human_bytes(bytes.scratch));
  }
};

template <>
struct fmt::formatter<kvsnip::Shape> {
  constexpr auto parse(format_parse_context& context) { return context.begin(); }
  template <class Context>
  auto format(const kvsnip::Shape& shape, Context& context) const {
    return fmt::format_to(context.out(), "{} query heads, {} kv heads, head_dim {}", shape.query_heads, shape.kv_heads, shape.head_dim);
  }
};
