#include "byte_bpe.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>

namespace mindspeed::byte_bpe {

namespace {

uint64_t load(const uint8_t* p, size_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, p, bytes);
  return value;
}

// The words of a text are short: two overlapping loads of eight bytes hold one of up to 16.
uint64_t hash(const uint8_t* word, size_t length) {
  uint64_t h = length;
  const auto mix = [&h](uint64_t value) {
    h = (h ^ value) * 0x9E3779B97F4A7C15u;
    h ^= h >> 32;
  };
  if (length >= 8) {
    for (size_t i = 0; i + 8 < length; i += 8) mix(load(word + i, 8));
    mix(load(word + length - 8, 8));
  } else if (length >= 4) {
    mix(load(word, 4) << 32 | load(word + length - 4, 4));
  } else {
    mix(uint64_t{word[0]} << 16 | uint64_t{word[length / 2]} << 8 | word[length - 1]);
  }
  return h;
}

const uint8_t* as_bytes(std::string_view text) { return reinterpret_cast<const uint8_t*>(text.data()); }

}  // namespace

const TokenTable::Slot& TokenTable::find(uint64_t hash, std::string_view token) const {
  for (size_t at = hash;; ++at) {
    const Slot& slot = slots_[at & (slots_.size() - 1)];
    if (slot.id < 0) return slot;
    if (slot.hash == hash && std::string_view(bytes_).substr(slot.begin, slot.length) == token) return slot;
  }
}

void TokenTable::set(std::string_view token, int32_t id) {
  const uint64_t h = hash(as_bytes(token), token.size());
  const auto begin = static_cast<uint32_t>(bytes_.size());
  const_cast<Slot&>(find(h, token)) = {h, begin, static_cast<uint32_t>(token.size()), id};
  bytes_.append(token);
}

int32_t TokenTable::id(std::string_view token) const {
  return token.empty() ? -1 : find(hash(as_bytes(token), token.size()), token).id;
}

void AddedTokens::add(std::string_view content, int32_t id) {
  starts_[static_cast<uint8_t>(content.at(0))] = true;
  uint32_t node = 0;
  for (const char c : content) {
    const auto [child, is_new] =
        nodes_[node].children.emplace(static_cast<uint8_t>(c), static_cast<uint32_t>(nodes_.size()));
    node = child->second;
    if (is_new) nodes_.emplace_back();
  }
  nodes_[node].id = id;
}

AddedTokens::Match AddedTokens::find(const uint8_t* begin, const uint8_t* end) const {
  for (const uint8_t* start = begin; start < end; ++start) {
    if (!starts_[*start]) continue;
    Match longest{start, 0, -1};
    uint32_t node = 0;
    for (const uint8_t* p = start; p < end; ++p) {
      const auto child = nodes_[node].children.find(*p);
      if (child == nodes_[node].children.end()) break;
      node = child->second;
      if (nodes_[node].id >= 0) longest = {start, static_cast<size_t>(p + 1 - start), nodes_[node].id};
    }
    if (longest.length > 0) return longest;
  }
  return {end, 0, -1};
}

ByteBpe::ByteBpe(Settings settings, Classes classes, TokenTable vocabulary, const Merges& merges,
                 AddedTokens raw_added, AddedTokens normalized_added)
    : settings_(std::move(settings)),
      classes_(std::move(classes)),
      vocabulary_(std::move(vocabulary)),
      raw_added_(std::move(raw_added)),
      normalized_added_(std::move(normalized_added)),
      pairs_(merges.size()) {
  if (merges.size() >= PairTable::kNone) throw std::invalid_argument("too many merges");
  const auto id_of = [this](std::string_view token) {
    const int32_t id = vocabulary_.id(token);
    if (id < 0) throw std::invalid_argument("a byte or a part of a merge is not in the vocabulary");
    if (static_cast<uint32_t>(id) > PairTable::kMaxId) throw std::invalid_argument("an id is too large");
    return static_cast<uint32_t>(id);
  };
  for (unsigned byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    byte_ids_[byte] = id_of({&c, 1});
  }
  merged_.reserve(merges.size());
  for (uint32_t rank = 0; rank < merges.size(); ++rank) {
    pairs_.set(id_of(merges.left(rank)), id_of(merges.right(rank)), rank);
    merged_.push_back(id_of(merges.both(rank)));
  }
  byte_pairs_.resize(65536);
  for (unsigned pair = 0; pair < 65536; ++pair)
    byte_pairs_[pair] = pairs_.rank(byte_ids_[pair >> 8], byte_ids_[pair & 0xFF]);
}

void ByteBpe::encode(const std::vector<std::string_view>& texts, Ids& ids, int32_t* lengths) const {
  // Whoever finds the memory of earlier calls in use (another thread, or one that a fork left behind) takes fresh one.
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  Scratch fresh;
  Scratch& scratch = lock.owns_lock() ? scratch_ : fresh;
  scratch.remembered.resize(kRemembered);
  for (const std::string_view text : texts) {
    const size_t before = ids.size();
    if (text.data() != nullptr && encode_text(text, scratch, ids)) {
      *lengths++ = static_cast<int32_t>(ids.size() - before);
    } else {
      ids.shrink_to(before);
      *lengths++ = -1;
    }
  }
}

bool ByteBpe::encode_text(std::string_view text, Scratch& scratch, Ids& ids) const {
  Scanner scanner(classes_);
  ids.append(settings_.prefix);
  const auto* p = reinterpret_cast<const uint8_t*>(text.data());
  const uint8_t* const end = p + text.size();
  while (p < end) {
    const auto added = raw_added_.find(p, end);
    encode_piece(p, added.begin, scanner, scratch, ids);
    if (added.length > 0) ids.append({added.id});
    p = added.begin + added.length;
  }
  ids.append(settings_.suffix);
  return !scanner.met_unknown();
}

// What lies between two added tokens of the first kind may hold some of the second.
void ByteBpe::encode_piece(const uint8_t* p, const uint8_t* end, Scanner& scanner, Scratch& scratch, Ids& ids) const {
  while (p < end) {
    const auto added = normalized_added_.find(p, end);
    scanner.cut(settings_.pattern, p, added.begin, [&](const uint8_t* word, const uint8_t* stop) {
      encode_word(word, static_cast<size_t>(stop - word), scratch, ids);
    });
    if (added.length > 0) ids.append({added.id});
    p = added.begin + added.length;
  }
}

void ByteBpe::encode_word(const uint8_t* word, size_t length, Scratch& scratch, Ids& ids) const {
  ids.reserve_more(length + 8);
  if (length == 1) {
    *ids.end() = static_cast<int32_t>(byte_ids_[*word]);
    return ids.grow(1);
  }
  if (length > sizeof(Remembered::word)) return ids.grow(merge(word, length, scratch, ids.end()));
  Remembered& slot = scratch.remembered[hash(word, length) % kRemembered];
  if (slot.length == length && std::memcmp(slot.word, word, length) == 0) {
    std::memcpy(ids.end(), slot.ids, sizeof slot.ids);
    return ids.grow(slot.count);
  }
  const size_t count = merge(word, length, scratch, ids.end());
  if (count <= std::size(slot.ids)) {
    slot.length = static_cast<uint8_t>(length);
    slot.count = static_cast<uint8_t>(count);
    std::memcpy(slot.word, word, length);
    std::memcpy(slot.ids, ids.end(), count * sizeof(int32_t));
  }
  ids.grow(count);
}

size_t ByteBpe::merge(const uint8_t* word, size_t length, Scratch& scratch, int32_t* ids) const {
  if (settings_.ignore_merges) {
    *ids = vocabulary_.id({reinterpret_cast<const char*>(word), length});
    if (*ids >= 0) return 1;
  }
  return length <= kShort ? merge_short(word, length, ids) : merge_long(word, length, scratch, ids);
}

// Merges the pair of lowest rank, the leftmost of equal ones, until there is none. A token stays where its first byte
// is; `keys` has rank and place of its pair with the next, so that the least key is the merge to do.
size_t ByteBpe::merge_short(const uint8_t* word, size_t length, int32_t* out) const {
  constexpr int32_t none = std::numeric_limits<int32_t>::max();
  uint32_t ids[kShort];
  int32_t keys[kShort];
  const size_t stop = (length + 15) / 16 * 16;
  const auto key = [](uint32_t rank, size_t at) {
    return rank == PairTable::kNone ? none : static_cast<int32_t>(rank << 6 | at);
  };
  for (size_t i = 0; i < length; ++i) ids[i] = byte_ids_[word[i]];
  for (size_t i = 0; i + 1 < length; ++i) keys[i] = key(byte_pairs_[word[i] << 8 | word[i + 1]], i);
  std::fill(keys + length - 1, keys + stop, none);
  uint64_t alive = ~uint64_t{0} >> (kShort - length);  // one bit for each byte at which a token begins
  for (;;) {
    int32_t least = none;
    for (size_t i = 0; i < stop; ++i) least = std::min(least, keys[i]);
    if (least == none) break;
    const size_t at = least & 63;
    uint64_t after = alive & (~uint64_t{0} << at << 1);
    const size_t gone = static_cast<size_t>(__builtin_ctzll(after));
    ids[at] = merged_[static_cast<uint32_t>(least) >> 6];
    keys[gone] = none;
    alive &= ~(uint64_t{1} << gone);
    after &= alive;
    keys[at] = after == 0 ? none : key(pairs_.rank(ids[at], ids[__builtin_ctzll(after)]), at);
    if (const uint64_t before = alive & ((uint64_t{1} << at) - 1)) {
      const size_t left = 63 - static_cast<size_t>(__builtin_clzll(before));
      keys[left] = key(pairs_.rank(ids[left], ids[at]), left);
    }
  }
  size_t count = 0;
  for (; alive != 0; alive &= alive - 1) out[count++] = static_cast<int32_t>(ids[__builtin_ctzll(alive)]);
  return count;
}

// The same with a heap of (rank, position) over a linked list; an entry whose pair has changed since is passed over.
size_t ByteBpe::merge_long(const uint8_t* word, size_t length, Scratch& scratch, int32_t* out) const {
  auto& [remembered, heap, ids, ranks, next, previous] = scratch;
  static_cast<void>(remembered);
  ids.resize(length);
  ranks.assign(length, PairTable::kNone);
  next.resize(length + 1);
  previous.resize(length + 1);
  heap.clear();
  const auto push = [&](size_t at, uint32_t rank) {
    ranks[at] = rank;
    if (rank == PairTable::kNone) return;
    heap.push_back(uint64_t{rank} << 32 | at);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  for (size_t i = 0; i < length; ++i) {
    ids[i] = byte_ids_[word[i]];
    next[i] = static_cast<uint32_t>(i + 1);
    previous[i + 1] = static_cast<uint32_t>(i);
    if (i + 1 < length) push(i, byte_pairs_[word[i] << 8 | word[i + 1]]);
  }
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto rank = static_cast<uint32_t>(heap.back() >> 32);
    const size_t at = heap.back() & 0xFFFFFFFFu;
    heap.pop_back();
    if (ranks[at] != rank) continue;
    const size_t gone = next[at], right = next[gone];
    ids[at] = merged_[rank];
    ranks[gone] = PairTable::kNone;
    next[at] = static_cast<uint32_t>(right);
    previous[right] = static_cast<uint32_t>(at);
    push(at, right < length ? pairs_.rank(ids[at], ids[right]) : PairTable::kNone);
    if (at > 0) push(previous[at], pairs_.rank(ids[previous[at]], ids[at]));
  }
  size_t count = 0;
  for (size_t at = 0; at < length; at = next[at]) out[count++] = static_cast<int32_t>(ids[at]);
  return count;
}

}  // namespace mindspeed::byte_bpe
