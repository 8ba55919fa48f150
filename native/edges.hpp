#pragma once
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace amips {

// Run work(low, high) over 0 ... count in steps, on so many threads, or on as many as can be started. What a step
// throws is thrown again when all have ended.
void parallel(int64_t count, int64_t step, int64_t threads, const std::function<void(int64_t, int64_t)>& work);

// Of candidates [n, width] (-1: none, in any order, some twice) at most `degree` for each key, nearest first: j stays
// unless one that stays already is at least as near to j as i is. With `fill` the first of the others fill up; with
// `ordered` candidates are gone through in the order in which they come.
void prune(const float* vectors, int64_t n, int64_t d, const int32_t* candidates, int64_t width, int64_t degree,
           bool fill, bool ordered, int64_t threads, int32_t* out);

// For each key the keys that are most often in the same top list, by weight of both ranks, [n, most].
// Places start[i] ... start[i + 1] of the lists hold key i.
void together(const int32_t* top, int64_t length, const int64_t* start, const int64_t* places, int64_t n, int64_t most,
              const float* weight, int64_t threads, int32_t* out);

// Codes of neighbours beside each other, in blocks of 32, from the codes of keys [n, r / 2].
void pack(const uint8_t* codes, int64_t r, const int32_t* ids, int64_t rows, int64_t degree, int64_t threads,
          uint8_t* out);

}  // namespace amips
