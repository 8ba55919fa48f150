// The search of cells for one query: which cells to scan, their codes, and the best keys scored again.
#pragma once
#include <cstdint>

namespace amips {

// Everything that a search reads. Entries are keys cell by cell: a key may be in a second cell.
struct Cells {
  int64_t c, d;
  const uint64_t* rows;    // [c]: where the codes of each cell are, or its float32 keys
  const int64_t* start;    // [c + 1]: where in the entries each cell begins
  const int64_t* entries;  // [e]
  const float* keys;       // [n, d]; null where the cells hold float32 keys, which are scored themselves
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
};

// Memory that one search needs, made by the caller: nothing is allocated within.
struct CellScratch {
  uint64_t* chosen;      // [c]
  float* cell_scores;    // [c]
  float* mass;           // [c]
  float* inner;          // [rank]
  float* projected;      // [r]
  uint8_t* table;        // [padded r, 16]
  uint64_t* candidates;  // [2 candidates + 64]
};

// `cell_scores` [c]: those of a router for x of norm 1; null where the cells have a linear router.
using CellSearch = void (*)(const Cells&, const CellEffort&, const float* x, const float* cell_scores, CellScratch&, float* scores,
                            int64_t* ids);

namespace generic { void search_cells(const Cells&, const CellEffort&, const float*, const float*, CellScratch&, float*, int64_t*); }
namespace avx2 { void search_cells(const Cells&, const CellEffort&, const float*, const float*, CellScratch&, float*, int64_t*); }

}  // namespace amips
