// What an error says, for either version of Catch2 (their string matchers differ).
#pragma once

#include <exception>
#include <initializer_list>
#include <string>
#include <string_view>

namespace test {

/// The message of the std::exception that `call` throws, or "" if it throws none.
template <class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}
/// Whether `text` has all the words.
inline bool says(std::string_view text, std::initializer_list<std::string_view> words) {
  bool all = true;
  for (const std::string_view word : words) all = all && text.find(word) != std::string_view::npos;
  return all;
}

}  // namespace test
