// Argument checks: one place that builds the message and raises it, with or without exceptions.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>

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

/// Out of line and cold: the caller's fast path carries a compare and a jump, no string work.
template <class Error, class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  raise<Error>(message.str());
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
