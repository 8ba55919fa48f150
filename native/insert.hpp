// Keys that are put into a graph while others walk it: what `amips.index.graph_insert` says in numpy, compiled.
#pragma once
#include <cstdint>

#include "walk.hpp"

namespace amips {

// What is written: rows of neighbours and, of LEAN, their codes beside each other. Keys, codes and directions of the
// new keys are there already.
struct Growth {
  int64_t degree;           // neighbours of a key; the rows of the graph are padded
  int32_t* neighbours;
  uint8_t* blocks;
  uint32_t* versions;
  const uint8_t* codes;     // LEAN: of each key, [n, r / 2]
  // [n, length + 32]: keys of norm 1 in whole numbers, in the space in which edges are chosen, and behind them, as a
  // float, what one of them stands for.
  const int8_t* directions;
  int64_t length;           // a multiple of 32
};

struct GrowthEffort {
  int64_t width;   // keys that a walk finds
  int64_t near;    // of those, the nearest, that neighbours are chosen from
  int64_t voters;  // of those, whose own neighbours are candidates, too
  int64_t links;   // keys that get an edge to a new one, if they have a place for it
};

// Memory that an insertion needs, made by the caller.
struct GrowthScratch {
  int32_t* ids;       // [width]
  uint64_t* near;     // [width]
  uint64_t* voted;    // [voters * padded degree]
  int32_t* table_ids; // [table], a power of two, at least twice that
  float* table;       // [table]
  int64_t places;     // in the table
  int32_t* row;       // [padded degree + 1]
  const float* weight; // [voters]
};

// Keys first ... first + count - 1 into a graph of `first` keys; `asked` [count, width of a query] is what each is looked
// for with (see `nearest`).
using Insertion = void (*)(Graph graph, const Growth&, const GrowthEffort&, int64_t first, int64_t count, const float* asked,
                           int64_t asked_width, Scratch&, GrowthScratch&);

namespace generic {
void insert(Graph, const Growth&, const GrowthEffort&, int64_t, int64_t, const float*, int64_t, Scratch&, GrowthScratch&);
}
namespace avx2 {
void insert(Graph, const Growth&, const GrowthEffort&, int64_t, int64_t, const float*, int64_t, Scratch&, GrowthScratch&);
}

}  // namespace amips
