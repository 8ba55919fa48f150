// The largest of some numbers, without the standard library: see walk.cpp for why.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace amips::AMIPS_ISA {
namespace {

// A float as a whole number in the same order; what is not a number comes last.
inline uint32_t ordered(float value) {
  if (value != value) return 0;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Put the `count` largest of `size` first, in any order (Hoare's selection).
inline void keep_largest(uint64_t* values, int64_t size, int64_t count) {
  int64_t low = 0, high = size - 1;
  while (low < high && count > 0 && count < size) {
    const uint64_t a = values[low], b = values[(low + high) / 2], c = values[high];
    const uint64_t pivot = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
    int64_t i = low, j = high;
    while (i <= j) {
      while (values[i] > pivot) i++;
      while (values[j] < pivot) j--;
      if (i <= j) {
        const uint64_t swapped = values[i];
        values[i++] = values[j], values[j--] = swapped;
      }
    }
    if (count - 1 <= j) high = j;
    else if (count - 1 >= i) low = i;
    else return;
  }
}

// Largest first (Shell's sort: there are few).
inline void sort_down(uint64_t* values, int64_t size) {
  static constexpr int64_t GAPS[] = {8929, 3905, 1750, 701, 301, 132, 57, 23, 10, 4, 1};
  for (int64_t gap : GAPS)
    for (int64_t a = gap; a < size; a++) {
      const uint64_t value = values[a];
      int64_t b = a;
      for (; b >= gap && values[b - gap] < value; b -= gap) values[b] = values[b - gap];
      values[b] = value;
    }
}

// The k best keys so far, best first, ties to the lower id; with `twice` a key that comes again is left out.
struct Best {
  int64_t k;
  bool twice;
  float* scores;
  int64_t* ids;
  int64_t kept = 0;

  void take(float score, int64_t id) {
    if (score != score) score = -INFINITY;  // what is not a number must not keep others out
    if (kept == k && !(scores[k - 1] < score || (scores[k - 1] == score && ids[k - 1] > id))) return;
    if (twice)
      for (int64_t a = 0; a < kept; a++)
        if (ids[a] == id) return;
    int64_t place = kept < k ? kept++ : k - 1;
    for (; place > 0 && (scores[place - 1] < score || (scores[place - 1] == score && ids[place - 1] > id)); place--)
      scores[place] = scores[place - 1], ids[place] = ids[place - 1];
    scores[place] = score, ids[place] = id;
  }

  void fill() const {
    for (int64_t a = kept; a < k; a++) scores[a] = -INFINITY, ids[a] = -1;
  }
};

}  // namespace
}  // namespace amips::AMIPS_ISA
