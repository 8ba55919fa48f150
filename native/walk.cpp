// Compiled once for every processor (AMIPS_ISA=generic) and once for those with AVX2. No function of the standard
// library is used that the compiler could make a shared copy of: the linker would keep one for both.
#include "walk.hpp"

#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "pool.hpp"
#include "rows.hpp"
#include "select.hpp"

namespace amips::AMIPS_ISA {
namespace {

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
inline float rounded(float value) { return (value + 12582912.f) - 12582912.f; }

// ALLOWED: some keys may not be results. A walk goes through them, and the margin is measured from the others.
// GROWING: rows may be written while they are read, and name keys that this graph does not have yet.
template <bool ALLOWED, bool GROWING>
class Walk {
 public:
  Walk(const Graph& graph, const Effort& effort, const float* x, Scratch& scratch, Counts& counts)
      : g(graph), effort(effort), x(x), s(scratch), counts(counts), pool(scratch.pool, effort.width),
        some(scratch.results, effort.results) {
    const float norm = std::sqrt(dot(x, x, g.d));
    prepare(norm);
    const double wide = double(effort.margin) * norm * units;
    margin = wide < WIDEST ? int64_t(wide) : int64_t(WIDEST);
  }

  // With no margin: of LEAN `x` is not a query but what codes are multiplied with.
  Walk(const Graph& graph, const Effort& effort, const float* x, Scratch& scratch, Counts& counts, bool)
      : g(graph), effort(effort), x(x), s(scratch), counts(counts), pool(scratch.pool, effort.width),
        some(scratch.results, effort.results), margin(int64_t(WIDEST)) {
    if (g.storage == LEAN) {
      for (int64_t j = 0; j < g.r; j++) s.projected[j] = x[j];
      round_query();
    } else {
      prepare(std::sqrt(dot(x, x, g.d)));
    }
  }

  void run(float* scores, int64_t* ids) {
    walk();
    if (ALLOWED && led_away()) counts.visited = -counts.visited;
    refine(scores, ids);
  }

  // The keys that were kept, best first; how many.
  int64_t run(int32_t* ids) {
    walk();
    for (int64_t a = 0; a < pool.size; a++) ids[a] = int32_t(id_of(pool.at[a]));
    return pool.size;
  }

 private:
  const Graph& g;
  const Effort& effort;
  const float* x;
  Scratch& s;
  Counts& counts;
  Pool pool, some;  // the best keys so far, and with ALLOWED the best that may be results
  int64_t margin = 0;
  double units = 1;  // of a score as a whole number, for one of the true score

  const Pool& results() const { return ALLOWED ? some : pool; }

  void walk() {
    enter();
    int64_t at = 0;
    for (bool every = counts.scored <= STARTS;;) {  // all entry points are in the pool already
      if (at == pool.size && !every) {  // nowhere to go: the other entry points may lead on
        every = true;
        at = least(at, enter_all());
        while (at < pool.size && (pool.at[at] & VISITED)) at++;
      }
      if (at == pool.size || (counts.visited && score_of(pool.at[at]) < floor(margin))) break;
      if (ALLOWED && counts.visited == effort.visits) break;
      const int64_t place = next(at);
      pool.at[place] |= VISITED | FETCHED;
      const int64_t lowest = visit(id_of(pool.at[place]));
      if (lowest < at) at = lowest;
      while (at < pool.size && (pool.at[at] & VISITED)) at++;
    }
  }

  // Whether few of the best keys may be results: the others lie where the edges and the margin say less.
  bool led_away() const {
    const int64_t seen = least(NEAREST, pool.size);
    int64_t count = 0;
    for (int64_t a = 0; a < seen; a++) count += effort.allowed[id_of(pool.at[a])] != 0;
    return count * NEAREST < effort.near * seen;
  }

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
    for (int64_t j = 0; j < g.d; j++) s.bytes[j] = uint8_t(128 + int32_t(rounded(x[j] * unit)));
    for (int64_t j = g.d; j < padded; j++) s.bytes[j] = 0;
    dots_bytes(s.bytes, g.projection, g.r, padded, s.scores);
    for (int64_t j = 0; j < g.r; j++)
      s.projected[j] = (float(s.scores[j]) - g.offset[j]) * g.scale[j] * g.step[j] / unit;
    round_query();
  }

  void round_query() {
    float up = 1e-30f, down = 1e-30f, high = 1e-30f;
#pragma omp simd reduction(+ : up, down) reduction(max : high)
    for (int64_t j = 0; j < g.r; j++) {
      const float value = s.projected[j];
      up += most(value, 0.f);
      down += most(-value, 0.f);
      high = most(high, std::fabs(value));
    }
    const float times = least(127.f / high, (32767.f / 15.f - 0.5f * float(g.r)) / most(up, down));
    for (int64_t j = 0; j < g.r; j++) s.query[j] = int8_t(int32_t(rounded(s.projected[j] * times)));
    units = times;
  }

  // As a whole number, whatever it is: of a key that was not checked and is not a number, the least.
  static int32_t whole(double value) { return value > -2e9 ? (value < 2e9 ? int32_t(value) : 2000000000) : -2000000000; }

  const uint8_t* codes_of(int64_t row) const { return g.codes + row * g.degree * g.r / 2; }

  // Scores of keys by their codes: of LEAN those beside each other, of the others each key's own.
  void score(const int32_t* ids, int64_t count, const uint8_t* codes, int32_t* out) {
    if (g.storage == LEAN) {
      for (int64_t b = 0; b < count / BLOCK; b++) score_block(codes + b * BLOCK * g.r / 2, s.query, g.r, out + b * BLOCK);
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
    score(g.entry, g.entries, g.entry_codes, s.scores);
    int64_t best[STARTS], count = 0;
    for (int64_t e = 0; e < g.entries && g.entry[e] >= 0; e++) {
      counts.scored++;
      const int64_t entry = packed(s.scores[e], g.entry[e]);
      if (count == STARTS && entry <= best[STARTS - 1]) continue;
      int64_t place = count < STARTS ? count++ : STARTS - 1;
      for (; place > 0 && best[place - 1] < entry; place--) best[place] = best[place - 1];
      best[place] = entry;
    }
    for (int64_t e = 0; e < count; e++) take(best[e]);
  }

  // Keep every entry point that is within the margin; the first place that changed.
  int64_t enter_all() {
    score(g.entry, g.entries, g.entry_codes, s.scores);
    int64_t lowest = effort.width;
    for (int64_t e = 0; e < g.entries && g.entry[e] >= 0; e++) {
      counts.scored++;
      if (s.scores[e] >= floor(margin)) lowest = least(lowest, take(packed(s.scores[e], g.entry[e])));
    }
    return lowest;
  }

  // The place of a key in the pool; its width if it is not taken in, or is there already.
  int64_t take(int64_t entry) {
    if (ALLOWED && effort.allowed[id_of(entry)]) some.insert(entry);
    return pool.insert(entry);
  }

  // The lowest score that is still looked at.
  int64_t floor(int64_t below) const {
    const int64_t full = pool.size == pool.width ? score_of(pool.at[pool.size - 1]) : INT32_MIN + 1;
    if (results().size < effort.depth) return full;
    return most(full, score_of(results().at[effort.depth - 1]) - below);
  }

  // The place of the key to visit: the best whose codes were fetched before, or the best.
  int64_t next(int64_t at) {
    int64_t chosen = -1, seen = 0;
    for (int64_t a = at; a < pool.size && seen < AHEAD; a++) {
      if (pool.at[a] & VISITED) continue;
      seen++;
      if (pool.at[a] & FETCHED) {
        if (chosen < 0) chosen = a;
        continue;
      }
      pool.at[a] |= FETCHED;
      fetch(g.neighbours + id_of(pool.at[a]) * g.degree, 4 * g.degree);
      if (GROWING) fetch(g.versions + id_of(pool.at[a]), 4);
      if (g.storage == LEAN) fetch(codes_of(id_of(pool.at[a])), g.degree * g.r / 2);
    }
    return chosen < 0 ? at : chosen;
  }

  // The neighbours of a key, with their scores in `s.scores`.
  const int32_t* row(int64_t key) {
    const int32_t* ids = g.neighbours + key * g.degree;
    if (!GROWING) {
      score(ids, g.degree, codes_of(key), s.scores);
      return ids;
    }
    while_unchanged(g.versions + key, [&] {
      std::memcpy(s.row, ids, size_t(g.degree) * sizeof(int32_t));
      score(s.row, g.degree, codes_of(key), s.scores);
    });
    return s.row;
  }

  // Score the neighbours of a key and keep the best; the first place that changed.
  int64_t visit(int64_t key) {
    const int32_t* ids = row(key);
    counts.visited++;
    int64_t lowest = effort.width;
    for (int64_t b = 0; b < g.degree && ids[b] >= 0; b += BLOCK) {
      int64_t count = BLOCK;
      while (count && ids[b + count - 1] < 0) count--;
      counts.scored += count;
      uint32_t mask = reaching(s.scores + b, int32_t(floor(margin)));
      if (count < BLOCK) mask &= (uint32_t(1) << count) - 1;
      for (; mask; mask &= mask - 1) {
        const int64_t a = b + __builtin_ctz(mask);
        if (GROWING && ids[a] >= g.n) continue;
        lowest = least(lowest, take(packed(s.scores[a], ids[a])));
      }
    }
    return lowest;
  }

  // True inner products of the best keys, and the k best of those; ties go to the lower id.
  void refine(float* scores, int64_t* ids) {
    const int64_t size = results().size, *kept = results().at;
    int64_t count = size <= effort.depth ? size : least(size, effort.k);  // of few, codes need not choose
    Best best{effort.k, false, scores, ids};
    if (size > effort.depth) {
      const int64_t bound = score_of(kept[effort.depth - 1]) - int64_t(effort.refine * float(margin));
      while (count < size && score_of(kept[count]) >= bound) count++;
    }
    for (int64_t a = 0; a < least(count, FETCH_KEYS); a++) fetch(g.keys + id_of(kept[a]) * g.d, 4 * g.d);
    for (int64_t a = 0; a < count; a++) {
      if (a + FETCH_KEYS < count) fetch(g.keys + id_of(kept[a + FETCH_KEYS]) * g.d, 4 * g.d);
      const int64_t id = id_of(kept[a]);
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
  const auto walk = [&](auto&& one) { one.run(scores, ids); };
  if (graph.versions) {
    if (effort.allowed) walk(Walk<true, true>(graph, effort, x, scratch, counts));
    else walk(Walk<false, true>(graph, effort, x, scratch, counts));
  } else {
    if (effort.allowed) walk(Walk<true, false>(graph, effort, x, scratch, counts));
    else walk(Walk<false, false>(graph, effort, x, scratch, counts));
  }
}

int64_t nearest(const Graph& graph, const Effort& effort, const float* x, Scratch& scratch, int32_t* ids) {
  Counts counts{0, 0, 0};
  return Walk<false, false>(graph, effort, x, scratch, counts, true).run(ids);
}

void search_allowed(const float* keys, int64_t n, int64_t d, const uint8_t* allowed, const float* x, int64_t k,
                    float* scores, int64_t* ids) {
  Best best{k, false, scores, ids};
  int64_t next[FETCH_KEYS], count = 0;  // keys that were fetched, in a ring
  const auto take = [&](int64_t a) { best.take(dot(keys + next[a % FETCH_KEYS] * d, x, d), next[a % FETCH_KEYS]); };
  for (int64_t i = 0; i < n; i++) {
    uint64_t eight;
    for (; i + 8 <= n; i += 8) {
      std::memcpy(&eight, allowed + i, 8);
      if (eight) break;
    }
    if (i == n || !allowed[i]) continue;
    if (count >= FETCH_KEYS) take(count);
    next[count++ % FETCH_KEYS] = i;
    fetch(keys + i * d, 4 * d);
  }
  for (int64_t a = most(count - FETCH_KEYS, 0); a < count; a++) take(a);
  best.fill();
}

}  // namespace amips::AMIPS_ISA
