// Compiled once for every processor and once for those with AVX2, as walk.cpp is.
#include "cells.hpp"

#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "select.hpp"

namespace amips::AMIPS_ISA {
namespace {

constexpr int64_t FETCH_KEYS = 8;        // keys fetched ahead while candidates are scored again
constexpr uint64_t PLACE = (uint64_t(1) << 40) - 1;  // bits of a candidate that say which entry it is
constexpr float FAR = -87;               // where e^x counts as nothing

// e^x of x <= 0, within 2e-7 of itself: 2^n times a polynomial, in steps that a compiler makes vectors of.
inline float exponential(float x) {
  const float power = (x > FAR ? x : FAR) * 1.44269504f, n = std::floor(power + 0.5f), f = power - n;
  float p = 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const int32_t bits = (int32_t(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

class Scan {
 public:
  Scan(const Cells& cells, const CellEffort& asked, const float* x, CellScratch& scratch, float* scores, int64_t* ids)
      : cells(cells), asked(asked), x(x), s(scratch), best{asked.k, cells.twice, scores, ids} {}

  // `projected` [r]: x times the projection of the codes, if there are any.
  void run(const float* cell_scores, const float* projected) {
    const int64_t probes = choose(cell_scores);
    if (cells.parts[0].keys) {
      prepare(projected);
      for (int64_t a = 0; a < probes; a++)
        for (int64_t b = 0; b < cells.count; b++) scan_codes(cells.parts[b], cell_of(a));
      score_again();
    } else {
      for (int64_t a = 0; a < probes; a++)
        for (int64_t b = 0; b < cells.count; b++) scan_keys(cells.parts[b], cell_of(a));
    }
    best.fill();
  }

 private:
  const Cells& cells;
  const CellEffort& asked;
  const float* x;
  CellScratch& s;
  Best best;
  int64_t count = 0;   // candidates
  uint32_t least = 0;  // score that a candidate must have

  int64_t size_of(int64_t cell) const {
    int64_t size = 0;
    for (int64_t b = 0; b < cells.count; b++) size += cells.parts[b].start[cell + 1] - cells.parts[b].start[cell];
    return size;
  }
  int64_t cell_of(int64_t a) const { return int64_t(~uint32_t(s.chosen[a])); }

  // The cells to scan, best first, ties to the lower; their number.
  int64_t choose(const float* cell_scores) {
    const auto packed = [&](int64_t j) { return uint64_t(ordered(cell_scores[j])) << 32 | uint32_t(~uint32_t(j)); };
    const auto take_all = [&] {
      for (int64_t j = 0; j < cells.c; j++) s.chosen[j] = packed(j);
    };
    if (asked.probes) {
      take_all();
      const int64_t probes = asked.probes < cells.c ? asked.probes : cells.c;
      keep_largest(s.chosen, cells.c, probes);
      sort_down(s.chosen, probes);
      return probes;
    }
    int64_t first = 0, probes = 0;
    for (int64_t j = 1; j < cells.c; j++)
      if (ordered(cell_scores[j]) > ordered(cell_scores[first])) first = j;
    const float high = cell_scores[first], times = 1 / asked.temperature;
    for (int64_t j = 0; j < cells.c; j++) {
      const float below = (cell_scores[j] - high) * times;
      s.mass[j] = below > FAR ? exponential(below) : 0.f;
    }
    float sum = 0;
    for (int64_t j = 0; j < cells.c; j++) sum += s.mass[j];
    const float bound = asked.min_mass * sum;
    int64_t entries = 0;
    for (int64_t j = 0; j < cells.c; j++)
      if (s.mass[j] >= bound || j == first) s.chosen[probes++] = packed(j), entries += size_of(j);
    if (entries < asked.keys && probes < cells.c) {  // as many of the best cells as hold enough
      take_all();
      sort_down(s.chosen, cells.c);
      for (entries = probes = 0; probes < cells.c && entries < asked.keys; probes++) entries += size_of(cell_of(probes));
      return probes;
    }
    sort_down(s.chosen, probes);
    return probes;
  }

  // The part of the score that each value of a code has, as a byte; sums over all of them fit into 16 bits.
  void prepare(const float* projected) {
    float widest = 1e-30f, together = 1e-30f;
    for (int64_t j = 0; j < cells.r; j++) {
      const float value = projected[j];
      const float* book = cells.codebook + 16 * j;
      float low = book[0], high = book[0];
      for (int v = 1; v < 16; v++) low = book[v] < low ? book[v] : low, high = book[v] > high ? book[v] : high;
      const float span = (high - low) * std::fabs(value);
      widest = span > widest ? span : widest;
      together += span;
    }
    const float most = (65535.f - float(cells.r)) / together, times = 255.f / widest < most ? 255.f / widest : most;
    for (int64_t j = 0; j < cells.r; j++) {
      const float value = projected[j] * times;
      const float* book = cells.codebook + 16 * j;
      float lowest = book[0];
      for (int v = 1; v < 16; v++)
        if ((book[v] < lowest) == (value > 0)) lowest = book[v];
      for (int v = 0; v < 16; v++) {
        const float part = (book[v] - lowest) * value;
        s.table[16 * j + v] = part < 255.f ? uint8_t(part + 0.5f) : 255;
      }
    }
    if (cells.r % 2) std::memset(s.table + 16 * cells.r, 0, 16);
  }

  bool may_be(const CellPart& part, int64_t place) const {
    return !asked.allowed || asked.allowed[part.first + part.entries[place]];
  }

  void scan_codes(const CellPart& part, int64_t cell) {
    const int64_t low = part.start[cell], size = part.start[cell + 1] - low, pairs = (cells.r + 1) / 2;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(part.rows[cell]);
    alignas(32) uint16_t scores[BLOCK];
    for (int64_t at = 0; at < size; at += BLOCK, codes += BLOCK * pairs) {
      score_tables(codes, s.table, pairs, scores);
      uint32_t mask = reaching(scores, least);
      if (size - at < BLOCK) mask &= (uint32_t(1) << (size - at)) - 1;
      for (; mask; mask &= mask - 1) {
        const int64_t a = __builtin_ctz(mask), place = low + at + a;
        if (!may_be(part, place)) continue;
        s.candidates[count++] = uint64_t(scores[a]) << 40 | (PLACE - uint64_t(part.places + place));  // ties: the first
      }
      if (count >= 2 * asked.candidates) cut();
    }
  }

  // Keep the best candidates; others must be better than the last of them.
  void cut() {
    keep_largest(s.candidates, count, asked.candidates);
    count = asked.candidates;
    uint64_t last = s.candidates[0];
    for (int64_t a = 1; a < count; a++) last = s.candidates[a] < last ? s.candidates[a] : last;
    least = uint32_t(last >> 40) + 1;
  }

  void score_again() {
    if (count > asked.candidates) cut();
    // The last part that begins no later: there are few parts.
    const auto part_of = [&](int64_t CellPart::* begin, int64_t at) {
      const CellPart* part = cells.parts + cells.count - 1;
      while (at < part->*begin) part--;
      return part;
    };
    const auto key = [&](int64_t a) {
      const int64_t id = int64_t(s.candidates[a]);
      const CellPart* part = part_of(&CellPart::first, id);
      return part->keys + (id - part->first) * cells.d;
    };
    for (int64_t a = 0; a < count; a++) {
      const int64_t place = int64_t(PLACE - (s.candidates[a] & PLACE));
      const CellPart* part = part_of(&CellPart::places, place);
      s.candidates[a] = uint64_t(part->first + part->entries[place - part->places]);
    }
    for (int64_t a = 0; a < count; a++) {
      if (a == 0) for (int64_t b = 0; b < FETCH_KEYS && b < count; b++) fetch(key(b), 4 * cells.d);
      if (a + FETCH_KEYS < count) fetch(key(a + FETCH_KEYS), 4 * cells.d);
      best.take(dot(key(a), x, cells.d), int64_t(s.candidates[a]));
    }
  }

  void scan_keys(const CellPart& part, int64_t cell) {
    const float* row = reinterpret_cast<const float*>(part.rows[cell]);
    for (int64_t at = part.start[cell]; at < part.start[cell + 1]; at++, row += cells.d)
      if (may_be(part, at)) best.take(dot(row, x, cells.d), part.first + part.entries[at]);
  }
};

// W A x / ||x|| of m queries, [m, c].
const float* route(const Cells& cells, const float* x, int64_t m, CellScratch& s) {
  const float* inner = x;
  if (cells.reduce) dots_of(cells.reduce, cells.rank, cells.d, x, m, s.inner), inner = s.inner;
  dots_of(cells.weights, cells.c, cells.rank, inner, m, s.cell_scores);
  for (int64_t i = 0; i < m; i++) {
    float* of_query = s.cell_scores + i * cells.c;
    const float times = 1 / std::sqrt(dot(x + i * cells.d, x + i * cells.d, cells.d));
    for (int64_t j = 0; j < cells.c; j++) of_query[j] *= times;
  }
  return s.cell_scores;
}

}  // namespace

void search_cells(const Cells& cells, const CellEffort& asked, const float* x, int64_t m, const float* cell_scores,
                  CellScratch& scratch, float* scores, int64_t* ids) {
  if (!cell_scores) cell_scores = route(cells, x, m, scratch);
  if (cells.parts[0].keys) dots_of(cells.projection, cells.r, cells.d, x, m, scratch.projected);
  for (int64_t i = 0; i < m; i++)
    Scan(cells, asked, x + i * cells.d, scratch, scores + i * asked.k, ids + i * asked.k)
        .run(cell_scores + i * cells.c, scratch.projected + i * cells.r);
}

void search_listed(const float* keys, const uint64_t* rows, int64_t d, const float* x, const int32_t* listed, int64_t count,
                   int64_t k, float* scores, int64_t* ids) {
  const auto key = [&](int64_t a) { return rows ? reinterpret_cast<const float*>(rows[listed[a]]) : keys + listed[a] * d; };
  Best best{k, false, scores, ids};
  const auto ahead = [&](int64_t a) {
    if (a < count && listed[a] >= 0) fetch(key(a), 4 * d);
  };
  for (int64_t a = 0; a < FETCH_KEYS; a++) ahead(a);
  for (int64_t a = 0; a < count; a++) {
    ahead(a + FETCH_KEYS);
    if (listed[a] >= 0) best.take(dot(key(a), x, d), listed[a]);
  }
  best.fill();
}

}  // namespace amips::AMIPS_ISA
