// Argument checks: one place that builds the message and raises it, with or without exceptions.
#pragma once

#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>

namespace kvsnip::detail {

/// Raise `Error`, or, in a build without exceptions, print the message to stderr and abort.
template <class Error>
[[noreturn]] inline void raise(const std::string& message) {
#if defined(__cpp_exceptions)
  throw Error(message);
#else
  std::fprintf(stderr, "kvsnip: %s\n", message.c_str());
  std::abort();
#endif
}

/// A piece of a message.
struct Part {
  std::string_view text;
  long long integer = 0;
  double number = 0;
  enum { is_text, is_integer, is_number } kind = is_text;

  Part(std::string_view x) : text(x) {}
  Part(const char* x) : text(x) {}
  Part(const std::string& x) : text(x) {}
  Part(std::integral auto x) : integer(static_cast<long long>(x)), kind(is_integer) {}
  Part(std::floating_point auto x) : number(static_cast<double>(x)), kind(is_number) {}
};
inline std::string message_of(std::initializer_list<Part> parts) {
  std::string message;
  for (const Part& part : parts) {
    char number[32] = "";
    if (part.kind == Part::is_integer) std::snprintf(number, sizeof number, "%lld", part.integer);
    if (part.kind == Part::is_number) std::snprintf(number, sizeof number, "%g", part.number);
    message.append(part.text).append(number);
  }
  return message;
}

/// Out of line and cold: the caller's fast path carries a compare and a jump, no string work.
template <class Error, class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) {
  raise<Error>(message_of({Part(parts)...}));
}

/// A bad argument: the message names the parameter, the limit and the value received.
template <class... Parts>
inline void require(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail<std::invalid_argument>(parts...);
}

/// A call that the protocol does not allow now (a stale step, an update before the callbacks).
template <class... Parts>
inline void require_state(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail<std::logic_error>(parts...);
}

}  // namespace kvsnip::detail
