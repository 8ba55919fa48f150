// Compiled once for every processor (AMIPS_ISA=generic) and once for those with AVX2. No function of the standard
// library is used that the compiler could make a shared copy of: the linker would keep one for both.
#include "walk.hpp"

#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "select.hpp"

namespace amips::AMIPS_ISA {
namespace {

constexpr int64_t VISITED = 1, FETCHED = 2, FLAGS = 3;
constexpr int STARTS = 8;         // entry points that a walk begins at
constexpr int64_t AHEAD = 2;      // unvisited keys whose codes are fetched before they are needed
constexpr int64_t FETCH_KEYS = 6; // keys fetched ahead while candidates are scored again
constexpr double WIDEST = double(int64_t(1) << 33);  // more than any two scores differ by
constexpr double UNITS = 1 << 28;  // of FLAT: that the largest score there can be has

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline float most(float a, float b) { return a > b ? a : b; }
inline float least(float a, float b) { return a < b ? a : b; }

// To the nearest whole number, of those within four million: in steps that a compiler makes vectors of.
inline float nearest(float value) { return (value + 12582912.f) - 12582912.f; }

class Walk {
 public:
  Walk(const Graph& graph, const Effort& effort, const float* x, Scratch& scratch, Counts& counts)
      : g(graph), effort(effort), x(x), s(scratch), counts(counts), pool(scratch.pool) {
    const float norm = std::sqrt(dot(x, x, g.d));
    prepare(norm);
    const double wide = double(effort.margin) * norm * units;
    margin = wide < WIDEST ? int64_t(wide) : int64_t(WIDEST);
    pool[0] = INT64_MIN;
  }

  void run(float* scores, int64_t* ids) {
    enter();
    int64_t at = 0;
    for (bool every = counts.scored <= STARTS;;) {  // all entry points are in the pool already
      if (at == size && !every) {  // nowhere to go: the other entry points may lead on
        every = true;
        at = least(at, enter_all());
        while (at < size && (pool[at] & VISITED)) at++;
      }
      if (at == size || (counts.visited && score_of(pool[at]) < floor(margin))) break;
      const int64_t place = next(at);
      pool[place] |= VISITED | FETCHED;
      const int64_t lowest = visit(id_of(pool[place]));
      if (lowest < at) at = lowest;
      while (at < size && (pool[at] & VISITED)) at++;
    }
    refine(scores, ids);
  }

 private:
  const Graph& g;
  const Effort& effort;
  const float* x;
  Scratch& s;
  Counts& counts;
  int64_t* pool;  // score, id, flags of the best keys so far, best first; then smallest numbers
  int64_t size = 0, top = 1, margin = 0;
  double units = 1;  // of a score as a whole number, for one of the true score

  static int32_t score_of(int64_t entry) { return int32_t(entry >> 32); }
  static int64_t id_of(int64_t entry) { return (entry >> 2) & 0x3fffffff; }
  static int64_t packed(int32_t score, int64_t id) { return int64_t(score) * (int64_t(1) << 32) + (id << 2); }

  // The query as whole numbers. Of LEAN: A x, for which x is taken as bytes around 128 and A as small numbers, times
  // the step of each value, as large as 16 bits hold the sum of all products with 4-bit codes.
  void prepare(float norm) {
    if (g.storage == FLAT) {
      units = UNITS / (double(g.largest) * norm + 1e-290);
      return;
    }
    float largest = 1e-30f;
    if (g.storage == SQ8) {
      for (int64_t j = 0; j < g.d; j++) largest = most(largest, std::fabs(x[j] * g.step[j]));
      const float unit = least(32767.f, 2147483647.f / 128.f / float(g.d)) / largest;
      for (int64_t j = 0; j < g.d; j++) s.query16[j] = int16_t(std::lrintf(x[j] * g.step[j] * unit));
      units = unit;
      return;
    }
    const int64_t padded = (g.d + 31) / 32 * 32;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < g.d; j++) largest = most(largest, std::fabs(x[j]));
    const float unit = 127.f / largest;
    for (int64_t j = 0; j < g.d; j++) s.bytes[j] = uint8_t(128 + int32_t(nearest(x[j] * unit)));
    for (int64_t j = g.d; j < padded; j++) s.bytes[j] = 0;
    float up = 1e-30f, down = 1e-30f, high = 1e-30f;
    dots_bytes(s.bytes, g.projection, g.r, padded, s.scores);
#pragma omp simd reduction(+ : up, down) reduction(max : high)
    for (int64_t j = 0; j < g.r; j++) {
      const float value = (float(s.scores[j]) - g.offset[j]) * g.scale[j] * g.step[j] / unit;
      s.projected[j] = value;
      up += most(value, 0.f);
      down += most(-value, 0.f);
      high = most(high, std::fabs(value));
    }
    const float times = least(127.f / high, (32767.f / 15.f - 0.5f * float(g.r)) / most(up, down));
    for (int64_t j = 0; j < g.r; j++) s.query[j] = int8_t(int32_t(nearest(s.projected[j] * times)));
    units = times;
  }

  // As a whole number, whatever it is: of a key that was not checked and is not a number, the least.
  static int32_t whole(double value) { return value > -2e9 ? (value < 2e9 ? int32_t(value) : 2000000000) : -2000000000; }

  const uint8_t* codes_of(int64_t row) const { return g.codes + row * g.degree * g.r / 2; }

  // Scores of the keys in a row of neighbours (or of entries, which have codes behind those of the keys).
  void score(const int32_t* ids, int64_t count, int64_t row, int32_t* out) {
    if (g.storage == LEAN) {
      for (int64_t b = 0; b < count / BLOCK; b++)
        score_block(codes_of(row) + b * BLOCK * g.r / 2, s.query, g.r, out + b * BLOCK);
      return;
    }
    for (int64_t a = 0; a < count && ids[a] >= 0; a++) {
      if (a + 4 < count && ids[a + 4] >= 0) fetch_row(ids[a + 4]);
      out[a] = g.storage == FLAT
                   ? whole(double(dot(g.keys + int64_t(ids[a]) * g.d, x, g.d)) * units)
                   : dot_codes(reinterpret_cast<const int8_t*>(g.codes) + int64_t(ids[a]) * g.d, s.query16, g.d);
    }
  }

  void fetch_row(int64_t id) const {
    if (g.storage == FLAT) fetch(g.keys + id * g.d, 4 * g.d);
    else fetch(g.codes + id * g.d, g.d);
  }

  // Begin at the best entry points.
  void enter() {
    score(g.entry, g.entries, g.n, s.scores);
    int64_t best[STARTS], count = 0;
    for (int64_t e = 0; e < g.entries && g.entry[e] >= 0; e++) {
      counts.scored++;
      const int64_t entry = packed(s.scores[e], g.entry[e]);
      if (count == STARTS && entry <= best[STARTS - 1]) continue;
      int64_t place = count < STARTS ? count++ : STARTS - 1;
      for (; place > 0 && best[place - 1] < entry; place--) best[place] = best[place - 1];
      best[place] = entry;
    }
    for (int64_t e = 0; e < count; e++) insert(best[e]);
  }

  // Keep every entry point that is within the margin; the first place that changed.
  int64_t enter_all() {
    score(g.entry, g.entries, g.n, s.scores);
    int64_t lowest = effort.width;
    for (int64_t e = 0; e < g.entries && g.entry[e] >= 0; e++) {
      counts.scored++;
      if (s.scores[e] >= floor(margin)) lowest = least(lowest, insert(packed(s.scores[e], g.entry[e])));
    }
    return lowest;
  }

  // The place of a key in the pool; `size` or more if it is not taken in, or is there already.
  int64_t insert(int64_t entry) {
    const int64_t* base = pool;
    for (int64_t half = top >> 1; half; half >>= 1) base += base[half - 1] >= entry ? half : 0;
    const int64_t place = base - pool;
    if (place >= effort.width) return effort.width;
    if (place && (pool[place - 1] & ~FLAGS) == entry) return effort.width;
    if (size < effort.width) {
      size++;
      if (size == top) {  // the search above looks at `top` - 1 places: there are more than keys
        for (int64_t a = top; a < 2 * top; a++) pool[a] = INT64_MIN;
        top *= 2;
      }
    }
    std::memmove(pool + place + 1, pool + place, size_t(size - 1 - place) * sizeof(int64_t));
    pool[place] = entry;
    return place;
  }

  // The lowest score that is still looked at.
  int64_t floor(int64_t below) const {
    const int64_t full = size == effort.width ? score_of(pool[size - 1]) : INT32_MIN + 1;
    if (size < effort.depth) return full;
    return most(full, score_of(pool[effort.depth - 1]) - below);
  }

  // The place of the key to visit: the best whose codes were fetched before, or the best.
  int64_t next(int64_t at) {
    int64_t chosen = -1, seen = 0;
    for (int64_t a = at; a < size && seen < AHEAD; a++) {
      if (pool[a] & VISITED) continue;
      seen++;
      if (pool[a] & FETCHED) {
        if (chosen < 0) chosen = a;
        continue;
      }
      pool[a] |= FETCHED;
      fetch(g.neighbours + id_of(pool[a]) * g.degree, 4 * g.degree);
      if (g.storage == LEAN) fetch(codes_of(id_of(pool[a])), g.degree * g.r / 2);
    }
    return chosen < 0 ? at : chosen;
  }

  // Score the neighbours of a key and keep the best; the first place that changed.
  int64_t visit(int64_t key) {
    const int32_t* ids = g.neighbours + key * g.degree;
    counts.visited++;
    score(ids, g.degree, key, s.scores);
    int64_t lowest = effort.width;
    for (int64_t b = 0; b < g.degree && ids[b] >= 0; b += BLOCK) {
      int64_t count = BLOCK;
      while (count && ids[b + count - 1] < 0) count--;
      counts.scored += count;
      uint32_t mask = reaching(s.scores + b, int32_t(floor(margin)));
      if (count < BLOCK) mask &= (uint32_t(1) << count) - 1;
      for (; mask; mask &= mask - 1) {
        const int64_t a = b + __builtin_ctz(mask);
        lowest = least(lowest, insert(packed(s.scores[a], ids[a])));
      }
    }
    return lowest;
  }

  // True inner products of the best keys, and the k best of those; ties go to the lower id.
  void refine(float* scores, int64_t* ids) {
    int64_t count = size <= effort.depth ? size : least(size, effort.k);  // of few, codes need not choose
    Best best{effort.k, false, scores, ids};
    if (size > effort.depth) {
      const int64_t bound = score_of(pool[effort.depth - 1]) - int64_t(effort.refine * float(margin));
      while (count < size && score_of(pool[count]) >= bound) count++;
    }
    for (int64_t a = 0; a < least(count, FETCH_KEYS); a++) fetch(g.keys + id_of(pool[a]) * g.d, 4 * g.d);
    for (int64_t a = 0; a < count; a++) {
      if (a + FETCH_KEYS < count) fetch(g.keys + id_of(pool[a + FETCH_KEYS]) * g.d, 4 * g.d);
      const int64_t id = id_of(pool[a]);
      best.take(dot(g.keys + id * g.d, x, g.d), id);
    }
    counts.refined = count;
    best.fill();
  }
};

}  // namespace

void search(const Graph& graph, const Effort& effort, const float* x, Scratch& scratch, float* scores, int64_t* ids,
            Counts& counts) {
  counts = {0, 0, 0};
  Walk(graph, effort, x, scratch, counts).run(scores, ids);
}

}  // namespace amips::AMIPS_ISA
