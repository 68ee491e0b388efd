// How a text falls into words: scanners that do what the regular expressions of four kinds of tokenizer do.
//
// A scanner is chosen by the expression as a whole, so each function below is one alternative after the other, in the
// order of the expression. All of them look at a byte a bounded number of times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace mindspeed::byte_bpe {

enum class Pattern : int { kGpt2 = 0, kQwen2 = 1, kLlama3 = 2, kDeepseekV3 = 3 };

enum Class : uint16_t {
  kLetter = 1,        // \p{L}
  kNumber = 2,        // \p{N}
  kMark = 4,          // \p{M}
  kPunctuation = 8,   // \p{P}
  kSymbol = 16,       // \p{S}
  kSpace = 32,        // \s
  kNewline = 64,      // [\r\n]
  kIdeograph = 128,   // DeepSeek's [一-龥぀-ゟ゠-ヿ]
  kUnknown = 256,     // its class is not certain: the text has to go elsewhere
};

// The classes of all code points, in blocks of 256 of which equal ones are stored once.
class Classes {
 public:
  static constexpr uint32_t kBlock = 256;

  // majors: for each code point from 0 the first letter of its general category, or 0 where that is not certain.
  explicit Classes(const uint8_t* majors, size_t count) {
    for (size_t start = 0; start + kBlock <= count; start += kBlock) {
      uint16_t block[kBlock];
      for (uint32_t i = 0; i < kBlock; ++i) block[i] = class_of(static_cast<uint32_t>(start) + i, majors[start + i]);
      size_t same = 0;
      while (same < blocks_.size() && std::memcmp(&blocks_[same], block, sizeof block) != 0) same += kBlock;
      if (same == blocks_.size()) blocks_.insert(blocks_.end(), block, block + kBlock);
      starts_.push_back(static_cast<uint32_t>(same));
    }
    std::memcpy(ascii_, &blocks_[starts_[0]], sizeof ascii_);
  }

  unsigned ascii(uint8_t byte) const { return ascii_[byte]; }

  unsigned of(uint32_t code_point) const {
    const uint32_t block = code_point / kBlock;
    return block < starts_.size() ? blocks_[starts_[block] + code_point % kBlock] : unsigned{kUnknown};
  }

 private:
  static uint16_t class_of(uint32_t c, uint8_t major) {
    uint16_t found = 0;
    switch (major) {
      case 'L': found = kLetter; break;
      case 'N': found = kNumber; break;
      case 'M': found = kMark; break;
      case 'P': found = kPunctuation; break;
      case 'S': found = kSymbol; break;
      case 'Z': found = kSpace; break;
      case 0: found = kUnknown; break;
      default: break;
    }
    if ((c >= 9 && c <= 13) || c == 0x85) found |= kSpace;
    if (c == '\r' || c == '\n') found |= kNewline;
    if ((c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF)) found |= kIdeograph;
    return found;
  }

  std::vector<uint16_t> blocks_;
  std::vector<uint32_t> starts_;
  uint16_t ascii_[128];
};

// Cuts one piece of valid UTF-8 after the other into words; remembers whether it met an uncertain code point.
class Scanner {
 public:
  explicit Scanner(const Classes& classes) : classes_(classes) {}

  bool met_unknown() const { return (met_ & kUnknown) != 0; }

  // Calls emit(begin, end) for each word of [begin, end).
  template <typename Emit>
  void cut(Pattern pattern, const uint8_t* begin, const uint8_t* end, Emit&& emit) {
    switch (pattern) {
      case Pattern::kGpt2: return cut_with<&Scanner::gpt2>(begin, end, emit);
      case Pattern::kQwen2: return cut_with<&Scanner::cl100k<1>>(begin, end, emit);
      case Pattern::kLlama3: return cut_with<&Scanner::cl100k<3>>(begin, end, emit);
      case Pattern::kDeepseekV3: return cut_deepseek(begin, end, emit);
    }
  }

 private:
  using Bytes = const uint8_t*;

  // The class of the character at p, which is before the end; width is its bytes.
  unsigned at(Bytes p, int& width) {
    const uint32_t first = *p;
    if (first < 0x80) {
      width = 1;
      return classes_.ascii(*p);
    }
    uint32_t c;
    if (first < 0xE0) {
      width = 2;
      c = (first & 0x1F) << 6 | (p[1] & 0x3F);
    } else if (first < 0xF0) {
      width = 3;
      c = (first & 0x0F) << 12 | (p[1] & 0x3F) << 6 | (p[2] & 0x3F);
    } else {
      width = 4;
      c = (first & 0x07) << 18 | (p[1] & 0x3F) << 12 | (p[2] & 0x3F) << 6 | (p[3] & 0x3F);
    }
    const unsigned found = classes_.of(c);
    met_ |= found;
    return found;
  }

  Bytes run(Bytes p, Bytes end, unsigned classes) {
    int width;
    while (p < end && (at(p, width) & classes)) p += width;
    return p;
  }

  Bytes run_of_others(Bytes p, Bytes end, unsigned classes) {
    int width;
    while (p < end && !(at(p, width) & classes)) p += width;
    return p;
  }

  static Bytes newlines(Bytes p, Bytes end) {
    while (p < end && (*p == '\r' || *p == '\n')) ++p;
    return p;
  }

  static bool is_ascii_letter(uint8_t byte) { return static_cast<uint8_t>((byte | 0x20) - 'a') < 26; }

  // 's|'t|'re|'ve|'m|'ll|'d at p, which is an apostrophe: bytes, or 0. fold: (?i:...), in which U+017F is an s too.
  template <bool fold>
  static int contraction(Bytes p, Bytes end) {
    const auto letter = [&](int i) -> int {
      if (end - p <= i) return 0;
      return fold && is_ascii_letter(p[i]) ? p[i] | 0x20 : p[i];
    };
    switch (letter(1)) {
      case 's': case 't': case 'm': case 'd': return 2;
      case 'r': case 'v': return letter(2) == 'e' ? 3 : 0;
      case 'l': return letter(2) == 'l' ? 3 : 0;
      case 0xC5: return fold && letter(2) == 0xBF ? 3 : 0;
      default: return 0;
    }
  }

  // [\s*[\r\n]+|]\s+(?!\S)|\s+ at p, which is a space: up to the last line end of the run if line ends count; else
  // the run without its last character, which stays with what follows; else the run.
  template <bool line_ends>
  Bytes spaces(Bytes begin, Bytes end) {
    Bytes p = begin, last = begin, after_line_end = nullptr;
    int width;
    while (p < end) {
      const unsigned c = at(p, width);
      if (!(c & kSpace)) break;
      last = p;
      p += width;
      if (c & kNewline) after_line_end = p;
    }
    if (line_ends && after_line_end != nullptr) return after_line_end;
    return p == end || last == begin ? p : last;
  }

  // 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  Bytes gpt2(Bytes p, Bytes end) {
    if (*p == '\'') {
      if (const int length = contraction<false>(p, end)) return p + length;
    }
    const Bytes body = p + (*p == ' ');
    if (body < end) {
      int width;
      const unsigned c = at(body, width);
      if (c & kLetter) return run(body + width, end, kLetter);
      if (c & kNumber) return run(body + width, end, kNumber);
      if (!(c & kSpace)) return run_of_others(body + width, end, kSpace | kLetter | kNumber);
    }
    return spaces<false>(p, end);
  }

  // (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+
  // |\s+(?!\S)|\s+
  template <int digits>
  Bytes cl100k(Bytes p, Bytes end) {
    int width, next_width;
    const unsigned c = at(p, width);
    if (c & kLetter) return run(p + width, end, kLetter);
    if (c & kNumber) return number<digits>(p, end);
    if (*p == '\'') {
      if (const int length = contraction<true>(p, end)) return p + length;
    }
    Bytes body = p + width;
    if (!(c & kNewline) && body < end && (at(body, next_width) & kLetter)) {
      return run(body + next_width, end, kLetter);
    }
    if (*p == ' ' ? body < end && !(at(body, next_width) & (kSpace | kLetter | kNumber)) : !(c & kSpace)) {
      return newlines(run_of_others(body, end, kSpace | kLetter | kNumber), end);
    }
    return spaces<true>(p, end);
  }

  template <int digits>
  Bytes number(Bytes p, Bytes end) {
    int width;
    for (int i = 0; i < digits && p < end && (at(p, width) & kNumber); ++i) p += width;
    return p;
  }

  // The last of DeepSeek's expressions, or null where it does not match:
  // [!-/:-~ without letters and digits][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*
  // |\s*[\r\n]+|\s+(?!\S)|\s+
  Bytes deepseek(Bytes p, Bytes end) {
    int width, next_width = 0;
    const unsigned c = at(p, width);
    if (c & (kLetter | kMark)) return run(p + width, end, kLetter | kMark);
    const Bytes next = p + width;
    const unsigned following = next < end ? at(next, next_width) : 0;
    if (*p < 0x80 && (c & (kPunctuation | kSymbol)) && next < end && is_ascii_letter(*next)) {
      Bytes word = next;
      while (word < end && is_ascii_letter(*word)) ++word;
      return word;
    }
    if (!(c & (kNewline | kPunctuation | kSymbol)) && (following & (kLetter | kMark))) {
      return run(next + next_width, end, kLetter | kMark);
    }
    if ((*p == ' ' ? following : c) & (kPunctuation | kSymbol)) {
      return newlines(run(next, end, kPunctuation | kSymbol), end);
    }
    return c & kSpace ? spaces<true>(p, end) : nullptr;
  }

  // \p{N}{1,3}, then in what is left [一-龥぀-ゟ゠-ヿ]+, then in every piece so far the last expression.
  template <typename Emit>
  void cut_deepseek(Bytes p, Bytes end, Emit& emit) {
    while (p < end) {
      int width;
      const unsigned c = at(p, width);
      Bytes stop;
      if (c & kNumber) {
        stop = number<3>(p, end);
        emit(p, stop);
      } else {
        stop = c & kIdeograph ? run(p, end, kIdeograph) : run_of_others(p, end, kIdeograph | kNumber);
        cut_piece(p, stop, emit);
      }
      p = stop;
    }
  }

  // What no match covers is a word as well, up to the next match.
  template <typename Emit>
  void cut_piece(Bytes begin, Bytes end, Emit& emit) {
    Bytes p = begin;
    while (p < end) {
      if (const Bytes stop = deepseek(p, end)) {
        if (begin < p) emit(begin, p);
        emit(p, stop);
        begin = p = stop;
      } else {
        int width;
        at(p, width);
        p += width;
      }
    }
    if (begin < end) emit(begin, end);
  }

  template <Bytes (Scanner::*word)(Bytes, Bytes), typename Emit>
  void cut_with(Bytes p, Bytes end, Emit& emit) {
    while (p < end) {
      const Bytes stop = (this->*word)(p, end);
      emit(p, stop);
      p = stop;
    }
  }

  const Classes& classes_;
  unsigned met_ = 0;
};

}  // namespace mindspeed::byte_bpe
