// Byte-level byte pair encoding: texts to ids, as the tokenizers of GPT-2, Qwen, Llama 3 and DeepSeek do it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "byte_bpe_words.h"

namespace mindspeed::byte_bpe {

// A growing array whose memory can be given away.
class Ids {
 public:
  void reserve_more(size_t count) {
    if (capacity_ - size_ >= count) return;
    capacity_ = 2 * capacity_ + count + 1024;
    auto* moved = static_cast<int32_t*>(std::realloc(data_.get(), capacity_ * sizeof(int32_t)));
    if (moved == nullptr) throw std::bad_alloc();
    static_cast<void>(data_.release());
    data_.reset(moved);
  }
  void append(const std::vector<int32_t>& ids) {
    reserve_more(ids.size());
    for (const int32_t id : ids) *end() = id, ++size_;
  }
  int32_t* end() { return data_.get() + size_; }
  void grow(size_t count) { size_ += count; }
  void shrink_to(size_t size) { size_ = size; }
  size_t size() const { return size_; }
  int32_t* release() { return data_.release(); }

 private:
  struct Free {
    void operator()(int32_t* data) const { std::free(data); }
  };
  std::unique_ptr<int32_t, Free> data_;
  size_t size_ = 0, capacity_ = 0;
};

// Pair of ids -> rank. A slot is one number, so that eight of them share a cache line; most pairs that are asked for are
// no merge, which a table of bits that stays in the cache nearly always tells.
class PairTable {
 public:
  static constexpr uint32_t kNone = (1u << 22) - 1;  // no such merge; ranks are below
  static constexpr uint32_t kMaxId = (1u << 21) - 1;

  explicit PairTable(size_t merges) {
    while (slots_size() < 2 * merges) --shift_;
    slots_.assign(slots_size(), kEmpty);
    bits_.assign(slots_size() / 16, 0);
  }

  // A later merge of the same pair takes the place of the earlier.
  void set(uint32_t left, uint32_t right, uint32_t rank) {
    const uint64_t pair = key(left, right);
    size_t at = home(pair);
    while (slots_[at] != kEmpty && slots_[at] >> 22 != pair) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = pair << 22 | rank;
    bits_[bit(pair) / 64] |= uint64_t{1} << bit(pair) % 64;
  }

  uint32_t rank(uint32_t left, uint32_t right) const {
    const uint64_t pair = key(left, right);
    if (!(bits_[bit(pair) / 64] >> bit(pair) % 64 & 1)) return kNone;
    for (size_t at = home(pair);; at = (at + 1) & (slots_.size() - 1)) {
      const uint64_t slot = slots_[at];
      if (slot >> 22 == pair || slot == kEmpty) return slot & kNone;
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};  // its rank reads as kNone

  static uint64_t key(uint32_t left, uint32_t right) { return uint64_t{left} << 21 | right; }
  size_t slots_size() const { return size_t{1} << (64 - shift_); }
  size_t home(uint64_t pair) const { return (pair * 0x9E3779B97F4A7C15u) >> shift_; }

  size_t bit(uint64_t pair) const { return (pair * 0x9E3779B97F4A7C15u) >> (shift_ - 2); }

  int shift_ = 54;
  std::vector<uint64_t> slots_, bits_;
};

// Tokens as bytes -> ids; what is not there has id -1.
class TokenTable {
 public:
  explicit TokenTable(size_t tokens) : slots_(size_t{1} << bits_for(tokens)) {}

  void set(std::string_view token, int32_t id);
  int32_t id(std::string_view token) const;

 private:
  struct Slot {
    uint64_t hash = 0;
    uint32_t begin = 0, length = 0;
    int32_t id = -1;
  };

  static int bits_for(size_t tokens) {
    int bits = 1;
    while ((size_t{1} << bits) < 2 * tokens) ++bits;
    return bits;
  }
  const Slot& find(uint64_t hash, std::string_view token) const;

  std::vector<Slot> slots_;
  std::string bytes_;
};

// Pairs of tokens as bytes, in the order of their ranks.
class Merges {
 public:
  void append(std::string_view token) {
    bytes_.append(token);
    ends_.push_back(bytes_.size());
  }
  size_t size() const { return ends_.size() / 2; }
  std::string_view left(size_t rank) const { return between(2 * rank, 2 * rank + 1); }
  std::string_view right(size_t rank) const { return between(2 * rank + 1, 2 * rank + 2); }
  std::string_view both(size_t rank) const { return between(2 * rank, 2 * rank + 2); }

 private:
  std::string_view between(size_t first, size_t last) const {
    return std::string_view(bytes_).substr(ends_at(first), ends_at(last) - ends_at(first));
  }
  size_t ends_at(size_t token) const { return token == 0 ? 0 : ends_[token - 1]; }

  std::string bytes_;
  std::vector<size_t> ends_;
};

struct Settings {
  Pattern pattern;
  bool ignore_merges;                      // a word that is in the vocabulary is one token, whatever the merges say
  std::vector<int32_t> prefix, suffix;     // ids around each text
};

// Tokens that are looked for in the text before anything else: leftmost first, the longest of them.
class AddedTokens {
 public:
  void add(std::string_view content, int32_t id);

  // The first match in [begin, end); length 0 when there is none.
  struct Match {
    const uint8_t* begin;
    size_t length;
    int32_t id;
  };
  Match find(const uint8_t* begin, const uint8_t* end) const;

 private:
  struct Node {
    std::unordered_map<uint8_t, uint32_t> children;
    int32_t id = -1;
  };
  std::vector<Node> nodes_{Node{}};
  std::array<bool, 256> starts_{};
};

class ByteBpe {
 public:
  // The ids of the vocabulary differ.
  // Throws std::invalid_argument when a byte or a part of a merge is not in it, or a number is too large.
  ByteBpe(Settings settings, Classes classes, TokenTable vocabulary, const Merges& merges, AddedTokens raw_added,
          AddedTokens normalized_added);

  // Appends the ids of every text and writes how many; -1 where a text has a code point of uncertain class or no data.
  void encode(const std::vector<std::string_view>& texts, Ids& ids, int32_t* lengths) const;

 private:
  // One cache line: a word that was met before and its ids.
  struct alignas(64) Remembered {
    uint8_t length = 0, count = 0;
    uint8_t word[30];
    int32_t ids[8];
  };
  static constexpr size_t kRemembered = size_t{1} << 16;
  static constexpr size_t kShort = 64;  // bytes, one bit each; longer words take the way that is not quadratic

  struct Scratch {
    std::vector<Remembered> remembered;
    std::vector<uint64_t> heap;
    std::vector<uint32_t> ids, ranks, next, previous;
  };

  bool encode_text(std::string_view text, Scratch& scratch, Ids& ids) const;
  void encode_piece(const uint8_t* begin, const uint8_t* end, Scanner& scanner, Scratch& scratch, Ids& ids) const;
  void encode_word(const uint8_t* word, size_t length, Scratch& scratch, Ids& ids) const;
  size_t merge(const uint8_t* word, size_t length, Scratch& scratch, int32_t* ids) const;
  size_t merge_short(const uint8_t* word, size_t length, int32_t* ids) const;
  size_t merge_long(const uint8_t* word, size_t length, Scratch& scratch, int32_t* ids) const;

  Settings settings_;
  Classes classes_;
  TokenTable vocabulary_;
  AddedTokens raw_added_, normalized_added_;
  PairTable pairs_;
  std::vector<uint32_t> merged_;           // rank -> id of the two together
  std::vector<uint32_t> byte_pairs_;       // two bytes -> rank
  uint32_t byte_ids_[256];
  mutable std::mutex mutex_;
  mutable Scratch scratch_;
};

}  // namespace mindspeed::byte_bpe
