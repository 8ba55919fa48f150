// The search of cells for a few queries: which cells to scan, their codes, and the best keys scored again.
#pragma once
#include <cstdint>

namespace amips {

// Keys by cell. Entries are keys cell by cell: a key may be in a second cell.
struct CellPart {
  const uint64_t* rows;    // [c]: where the codes of each cell are, or its float32 keys
  const int64_t* start;    // [c + 1]: where in the entries each cell begins
  const int32_t* entries;  // [e]
  const float* keys;       // [n, d]; null where the cells hold float32 keys, which are scored themselves
  int64_t first;           // the number of its first key
  int64_t places;          // entries of the parts before
};

// Everything that a search reads: parts with the same cells and codes, of which all but the first were added later.
struct Cells {
  int64_t c, d;
  const CellPart* parts;   // one at least
  int64_t count;           // of parts
  int64_t r;               // values in a code
  const float* projection; // [r, d]
  const float* codebook;   // [r, 16]: what each value of a code stands for
  bool twice;              // some keys are in two cells
  // A linear router, W A x; null where its scores come with the query.
  int64_t rank;
  const float* weights;  // W [c, rank]
  const float* reduce;   // A [rank, d]; null where rank is d
};

struct CellEffort {
  int64_t k;
  int64_t probes;      // cells to scan; 0 for those with enough mass
  float temperature;   // of the softmax of the scores,
  float min_mass;      // which a cell has at least, unless it is the best
  int64_t keys;        // that the cells hold at least, by mass
  int64_t candidates;  // entries that are scored again
  const uint8_t* allowed;  // [n] of all parts: other than 0 of the keys that may be results; null if all may
};

// Memory that a search of m queries needs, made by the caller: nothing is allocated within.
struct CellScratch {
  uint64_t* chosen;      // [c]
  float* cell_scores;    // [m, c]
  float* mass;           // [c]
  float* inner;          // [m, rank]
  float* projected;      // [m, r]
  uint8_t* table;        // [padded r, 16]
  uint64_t* candidates;  // [2 candidates + 64]
};

// x [m, d]; `cell_scores` [m, c]: those of a router for x of norm 1, null where the cells have a linear router. Results
// are those of each query alone, to the last bit.
using CellSearch = void (*)(const Cells&, const CellEffort&, const float* x, int64_t m, const float* cell_scores, CellScratch&,
                            float* scores, int64_t* ids);

// The k best of listed keys [count] of one query x [d], by <x, key>; best first, ties to the lower id. `rows` [n] says
// where each key is; null where they lie one after the other, [n, d].
using ListSearch = void (*)(const float* keys, const uint64_t* rows, int64_t d, const float* x, const int32_t* listed,
                            int64_t count, int64_t k, float* scores, int64_t* ids);

namespace generic {
void search_cells(const Cells&, const CellEffort&, const float*, int64_t, const float*, CellScratch&, float*, int64_t*);
void search_listed(const float*, const uint64_t*, int64_t, const float*, const int32_t*, int64_t, int64_t, float*, int64_t*);
}
namespace avx2 {
void search_cells(const Cells&, const CellEffort&, const float*, int64_t, const float*, CellScratch&, float*, int64_t*);
void search_listed(const float*, const uint64_t*, int64_t, const float*, const int32_t*, int64_t, int64_t, float*, int64_t*);
}

}  // namespace amips
