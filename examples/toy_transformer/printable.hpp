// Tokens may be single bytes, and an untrained model produces any: what goes to a terminal has to be made fit for it.
#pragma once

#include <string>
#include <string_view>

namespace toy {

/// Passes UTF-8 characters on as soon as they are complete. Drops control characters but newline and tab; bytes that
/// make no character become U+FFFD, the replacement character.
class Printable {
 public:
  /// @return what can be printed by now
  std::string push(std::string_view bytes) {
    std::string out;
    for (const char c : bytes) push(static_cast<unsigned char>(c), out);
    return out;
  }

  /// @return what stands for a character cut short
  std::string finish() {
    std::string out;
    give_up(out);
    return out;
  }

 private:
  static constexpr bool continues(unsigned char byte) { return (byte & 0xC0) == 0x80; }

  /// Bytes of the character that starts with `lead`, 0 if none does: C0, C1 and F5 up never occur.
  static constexpr std::size_t length(unsigned char lead) {
    return lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  }

  void push(unsigned char byte, std::string& out) {
    if (!continues(byte) || pending_.empty()) give_up(out);
    pending_ += static_cast<char>(byte);
    const unsigned char lead = static_cast<unsigned char>(pending_[0]);
    if (length(lead) == 0) {
      give_up(out);
    } else if (pending_.size() == length(lead)) {
      const bool c0_or_del = (lead < 0x20 && lead != '\n' && lead != '\t') || lead == 0x7F;
      const bool c1 = lead == 0xC2 && byte < 0xA0;
      if (!c0_or_del && !c1) out += pending_;
      pending_.clear();
    }
  }

  void give_up(std::string& out) {
    if (!pending_.empty()) out += "\xEF\xBF\xBD";
    pending_.clear();
  }

  std::string pending_;  ///< the bytes of a character so far
};

}  // namespace toy
