// The walk of a graph, one query at a time: what `amips.index.graph_walk` says in numpy, compiled.
#pragma once
#include <cstddef>
#include <cstdint>

namespace amips {

constexpr int BLOCK = 32;  // neighbours, or entries of a cell, whose codes are scored together
enum Storage { FLAT = 0, SQ8 = 1, LEAN = 2 };

// Everything that a walk reads. Rows of `neighbours` end in -1; their length is a multiple of BLOCK. Where a graph
// grows, its arrays go on behind its n keys, and rows are written while others walk: `versions` says when.
struct Graph {
  int64_t n, d, degree, entries;
  const int32_t* neighbours;  // [n, degree]
  const int32_t* entry;       // [entries], padded with -1 to a multiple of BLOCK
  const float* keys;          // [n, d]
  int storage;
  // Codes: SQ8 int8 [n, d]; LEAN what `pack` makes, of the neighbours of keys and of the entries.
  const uint8_t *codes, *entry_codes;
  int64_t r;                // values in a code: d for SQ8, the reduced dimension for LEAN, a multiple of 4
  const float* step;        // [r]: what one unit of a code stands for
  const int8_t* projection; // LEAN: [r, padded d], see Query in walk.cpp
  const float* scale;       // LEAN: [r]: what one unit of the projection stands for
  const float* offset;      // LEAN: [r]: 128 times the sum of its row
  float largest;            // FLAT: the largest norm of a key
  const uint32_t* versions; // [n]: how often each row was begun or ended to be written; null if none is
};

struct Effort {
  int64_t k;      // results
  int64_t depth;  // the rank that `margin` is measured from
  int64_t width;  // keys kept while walking, at most
  float margin;   // how far below the key at that rank, in scores of a query of norm 1, a key is still visited
  float refine;   // the part of the margin within which keys are scored again
  const uint8_t* allowed = nullptr;  // [n]: other than 0 of the keys that may be results; null if all may
  int64_t results = 0;  // with `allowed`: keys kept that may be results, at most
  int64_t visits = 0;   // with `allowed`: keys visited, at most
  int64_t near = 0;     // with `allowed`: of NEAREST best keys so many may be results, or the walk was led away
};

constexpr int64_t NEAREST = 64;

struct Counts { int64_t visited, scored, refined; };  // visited: negative of a walk that was led away

// Memory that one walk needs, made by the caller: nothing is allocated within.
struct Scratch {
  int64_t* pool;     // a power of two of places, at least 2 width + 2
  int64_t* results;  // the same of Effort::results
  int32_t* row;      // [degree]
  int32_t* scores;   // [max(degree, padded entries, r)]
  float* projected;  // [r]
  int8_t* query;     // [r] of LEAN
  int16_t* query16;  // [d] of SQ8
  uint8_t* bytes;    // [padded d]
};

using Search = void (*)(const Graph&, const Effort&, const float* x, Scratch&, float* scores, int64_t* ids,
                        Counts& counts);

// The k best of the keys [n, d] that are allowed.
using SearchAllowed = void (*)(const float* keys, int64_t n, int64_t d, const uint8_t* allowed, const float* x, int64_t k,
                               float* scores, int64_t* ids);

// `nearest`: the keys with the best scores by a walk that keeps `width`, best first; how many. Of LEAN `x` is what codes
// are multiplied with, [r], otherwise a query.
namespace generic {
int64_t nearest(const Graph&, const Effort&, const float*, Scratch&, int32_t*);
void search(const Graph&, const Effort&, const float*, Scratch&, float*, int64_t*, Counts&);
void search_allowed(const float*, int64_t, int64_t, const uint8_t*, const float*, int64_t, float*, int64_t*);
}
namespace avx2 {
int64_t nearest(const Graph&, const Effort&, const float*, Scratch&, int32_t*);
void search(const Graph&, const Effort&, const float*, Scratch&, float*, int64_t*, Counts&);
void search_allowed(const float*, int64_t, int64_t, const uint8_t*, const float*, int64_t, float*, int64_t*);
}

}  // namespace amips
