// The door: numpy arrays in, numpy arrays out. Shapes are checked by the Python that calls.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "cells.hpp"
#include "edges.hpp"
#include "walk.hpp"

namespace nb = nanobind;
using namespace amips;

template <typename T>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

namespace {

constexpr int64_t QUERIES = 16;  // that a thread takes at a time

// AMIPS_NATIVE=generic takes the code for every processor, for tests of it.
bool with_avx2() {
  const char* wanted = std::getenv("AMIPS_NATIVE");
  if (wanted && std::string(wanted) == "generic") return false;
#if defined(AMIPS_HAS_AVX2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

#if defined(AMIPS_HAS_AVX2)
const Search search_graph = with_avx2() ? avx2::search : generic::search;
const CellSearch search_cells = with_avx2() ? avx2::search_cells : generic::search_cells;
#else
const Search search_graph = generic::search;
const CellSearch search_cells = generic::search_cells;
#endif

template <typename T>
void grow(std::vector<T>& array, int64_t size) {
  if (int64_t(array.size()) < size) array.resize(size);
}

// A graph ready to be walked; it keeps the arrays that it reads.
class Walker {
 public:
  Walker(Array<int32_t> neighbours, Array<int32_t> entry, Array<float> keys, int storage, Array<uint8_t> codes,
         int64_t r, Array<float> step, Array<int8_t> projection, Array<float> scale, Array<float> offset, float largest)
      : floats{keys, step, scale, offset}, ids{neighbours, entry}, bytes(codes), matrix(projection) {
    graph = {int64_t(neighbours.shape(0)), int64_t(keys.shape(1)), int64_t(neighbours.shape(1)),
             int64_t(entry.shape(0)),      neighbours.data(),      entry.data(),
             keys.data(),                  storage,                codes.data(),
             r,                            step.data(),            projection.data(),
             scale.data(),                 offset.data(),          largest};
  }

  // x [m, d] of norms near 1; scores [m, k], ids [m, k] and counts [m, 3] are written.
  void search(Array<float> x, int64_t depth, int64_t width, float margin, float refine, int64_t threads,
              Out<float> scores, Out<int64_t> ids, Out<int64_t> counts) const {
    const int64_t m = int64_t(x.shape(0)), k = int64_t(ids.shape(1));
    const Effort effort{k, depth, width, margin, refine};
    const auto rows = [&](int64_t low, int64_t high) {
      // Kept for the next call: a query alone should not pay for memory.
      thread_local Memory memory;
      memory.prepare(graph, width);
      for (int64_t i = low; i < high; i++) {
        Counts counted;
        search_graph(graph, effort, x.data() + i * graph.d, memory.scratch, scores.data() + i * k, ids.data() + i * k, counted);
        int64_t* to = counts.data() + 3 * i;
        to[0] = counted.visited, to[1] = counted.scored, to[2] = counted.refined;
      }
    };
    nb::gil_scoped_release release;
    if (m <= 1 || threads <= 1) rows(0, m);
    else parallel(m, QUERIES, threads, rows);
  }

 private:
  struct Memory {
    std::vector<int64_t> pool;
    std::vector<int32_t> scores;
    std::vector<float> projected;
    std::vector<int8_t> query;
    std::vector<int16_t> query16;
    std::vector<uint8_t> bytes;
    Scratch scratch{};
    void prepare(const Graph& g, int64_t width) {
      int64_t capacity = 4;
      while (capacity < 2 * width + 2) capacity *= 2;
      grow(pool, capacity);
      grow(scores, std::max({g.degree, g.entries, g.r}) + BLOCK);
      grow(projected, g.r + 1);
      grow(query, g.r + 4);
      grow(query16, g.d);
      grow(bytes, g.d + 32);
      scratch = {pool.data(), scores.data(), projected.data(), query.data(), query16.data(), bytes.data()};
    }
  };

  // References to the arrays that the graph points into.
  std::vector<Array<float>> floats;
  std::vector<Array<int32_t>> ids;
  Array<uint8_t> bytes;
  Array<int8_t> matrix;
  Graph graph;
};

// Cells ready to be searched for one query; it keeps the arrays that it reads, and what holds the rows of cells.
class Scanner {
 public:
  // `keys` is empty where the cells hold float32 keys.
  Scanner(nb::object owner, Array<uint64_t> rows, Array<int64_t> start, Array<int64_t> entries, int64_t d,
          Array<float> keys, Array<float> projection, Array<float> codebook, bool twice, Array<float> weights,
          Array<float> reduce)
      : owner(owner), addresses(rows), places{start, entries}, floats{keys, projection, codebook, weights, reduce} {
    const auto data = [](const Array<float>& array) { return array.size() ? array.data() : nullptr; };
    cells = {int64_t(rows.shape(0)),     d,            rows.data(),      start.data(), entries.data(),
             data(keys),                 int64_t(codebook.shape(0)),     data(projection),
             data(codebook),             twice,        int64_t(weights.shape(1)), data(weights), data(reduce)};
  }

  // x [1, d] of a norm near 1 and, if there is no linear router, scores of the cells [1, c], otherwise none;
  // scores [1, k] and ids [1, k] are written.
  void search(Array<float> x, Array<float> cell_scores, int64_t probes, float temperature, float min_mass,
              int64_t keys, int64_t candidates, Out<float> scores, Out<int64_t> ids) const {
    // Kept for the next call: a query alone should not pay for memory.
    thread_local struct {
      std::vector<uint64_t> chosen, candidates;
      std::vector<float> cell_scores, mass, inner, projected;
      std::vector<uint8_t> table;
    } memory;
    const CellEffort effort{int64_t(ids.shape(1)), probes, temperature, min_mass, keys, candidates};
    grow(memory.chosen, cells.c);
    grow(memory.cell_scores, cells.c);
    grow(memory.mass, cells.c);
    grow(memory.inner, cells.rank);
    grow(memory.projected, cells.r);
    grow(memory.table, 16 * (cells.r + 1));
    grow(memory.candidates, 2 * candidates + 2 * BLOCK);
    CellScratch scratch{memory.chosen.data(), memory.cell_scores.data(), memory.mass.data(),      memory.inner.data(),
                        memory.projected.data(), memory.table.data(), memory.candidates.data()};
    nb::gil_scoped_release release;
    search_cells(cells, effort, x.data(), cell_scores.size() ? cell_scores.data() : nullptr, scratch, scores.data(), ids.data());
  }

 private:
  nb::object owner;
  Array<uint64_t> addresses;
  std::vector<Array<int64_t>> places;
  std::vector<Array<float>> floats;
  Cells cells;
};

}  // namespace

// A copy of an array that is not of the right type would be read after it is gone, or written in vain.
#define AS_IT_IS nb::arg().noconvert()

NB_MODULE(_native, module) {
  nb::class_<Walker>(module, "Walker")
      .def(nb::init<Array<int32_t>, Array<int32_t>, Array<float>, int, Array<uint8_t>, int64_t, Array<float>,
                    Array<int8_t>, Array<float>, Array<float>, float>(),
           AS_IT_IS, AS_IT_IS, AS_IT_IS, nb::arg(), AS_IT_IS, nb::arg(), AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS,
           nb::arg())
      .def("search", &Walker::search, AS_IT_IS, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), AS_IT_IS,
           AS_IT_IS, AS_IT_IS);
  nb::class_<Scanner>(module, "Scanner")
      .def(nb::init<nb::object, Array<uint64_t>, Array<int64_t>, Array<int64_t>, int64_t, Array<float>, Array<float>,
                    Array<float>, bool, Array<float>, Array<float>>(),
           nb::arg(), AS_IT_IS, AS_IT_IS, AS_IT_IS, nb::arg(), AS_IT_IS, AS_IT_IS, AS_IT_IS, nb::arg(), AS_IT_IS,
           AS_IT_IS)
      .def("search", &Scanner::search, AS_IT_IS, AS_IT_IS, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), AS_IT_IS,
           AS_IT_IS);
  module.def("prune", [](Array<float> vectors, Array<int32_t> candidates, bool fill, bool ordered,
                         int64_t threads, Out<int32_t> out) {
    nb::gil_scoped_release release;
    prune(vectors.data(), vectors.shape(0), vectors.shape(1), candidates.data(), candidates.shape(1), out.shape(1), fill,
          ordered, threads, out.data());
  }, AS_IT_IS, AS_IT_IS, nb::arg(), nb::arg(), nb::arg(), AS_IT_IS);
  module.def("together", [](Array<int32_t> top, Array<int64_t> start, Array<int64_t> places, Array<float> weight,
                            int64_t threads, Out<int32_t> out) {
    nb::gil_scoped_release release;
    together(top.data(), top.shape(1), start.data(), places.data(), out.shape(0), out.shape(1), weight.data(), threads,
             out.data());
  }, AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS, nb::arg(), AS_IT_IS);
  module.def("pack", [](Array<uint8_t> codes, Array<int32_t> ids, int64_t threads, Out<uint8_t> out) {
    nb::gil_scoped_release release;
    pack(codes.data(), 2 * int64_t(codes.shape(1)), ids.data(), ids.shape(0), ids.shape(1), threads, out.data());
  }, AS_IT_IS, AS_IT_IS, nb::arg(), AS_IT_IS);
}
