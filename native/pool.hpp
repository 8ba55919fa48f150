// The best keys of a walk so far, in order.
#pragma once
#include <cstdint>
#include <cstring>

namespace amips::AMIPS_ISA {
namespace {

constexpr int64_t VISITED = 1, FETCHED = 2, FLAGS = 3;

inline int32_t score_of(int64_t entry) { return int32_t(entry >> 32); }
inline int64_t id_of(int64_t entry) { return (entry >> 2) & 0x3fffffff; }
inline int64_t packed(int32_t score, int64_t id) { return int64_t(score) * (int64_t(1) << 32) + (id << 2); }

// Score, id, flags of at most `width` keys, best first; then smallest numbers.
struct Pool {
  int64_t* at;  // a power of two of places, at least 2 width + 2
  int64_t width;
  int64_t size = 0, top = 1;

  Pool(int64_t* memory, int64_t width) : at(memory), width(width) { at[0] = INT64_MIN; }

  // The place of a key; `width` if it is not taken in, or is there already.
  int64_t insert(int64_t entry) {
    const int64_t* base = at;
    for (int64_t half = top >> 1; half; half >>= 1) base += base[half - 1] >= entry ? half : 0;
    const int64_t place = base - at;
    if (place >= width) return width;
    if (place && (at[place - 1] & ~FLAGS) == entry) return width;
    if (size < width) {
      size++;
      if (size == top) {  // the search above looks at `top` - 1 places: there are more than keys
        for (int64_t a = top; a < 2 * top; a++) at[a] = INT64_MIN;
        top *= 2;
      }
    }
    std::memmove(at + place + 1, at + place, size_t(size - 1 - place) * sizeof(int64_t));
    at[place] = entry;
    return place;
  }
};

}  // namespace
}  // namespace amips::AMIPS_ISA
