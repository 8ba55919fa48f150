// The door: numpy arrays in, numpy arrays out. Shapes are checked by the Python that calls.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cells.hpp"
#include "edges.hpp"
#include "insert.hpp"
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
const SearchAllowed search_allowed = with_avx2() ? avx2::search_allowed : generic::search_allowed;
const CellSearch search_cells = with_avx2() ? avx2::search_cells : generic::search_cells;
const ListSearch search_listed = with_avx2() ? avx2::search_listed : generic::search_listed;
const Insertion insert_keys = with_avx2() ? avx2::insert : generic::insert;
#else
const Search search_graph = generic::search;
const SearchAllowed search_allowed = generic::search_allowed;
const CellSearch search_cells = generic::search_cells;
const ListSearch search_listed = generic::search_listed;
const Insertion insert_keys = generic::insert;
#endif

template <typename T>
void grow(std::vector<T>& array, int64_t size) {
  if (int64_t(array.size()) < size) array.resize(size);
}

// What walks need.
struct Memory {
  std::vector<int64_t> pool, results;
  std::vector<int32_t> row, scores;
  std::vector<float> projected;
  std::vector<int8_t> query;
  std::vector<int16_t> query16;
  std::vector<uint8_t> bytes;
  Scratch scratch{};
  static int64_t places(int64_t width) {
    int64_t capacity = 4;
    while (capacity < 2 * width + 2) capacity *= 2;
    return capacity;
  }
  void prepare(const Graph& g, const Effort& effort) {
    grow(pool, places(effort.width));
    grow(results, places(effort.results));
    grow(row, g.degree);
    grow(scores, std::max({g.degree, g.entries, g.r}) + BLOCK);
    grow(projected, g.r + 1);
    grow(query, g.r + 4);
    grow(query16, g.d);
    grow(bytes, g.d + 32);
    scratch = {pool.data(), results.data(), row.data(), scores.data(), projected.data(), query.data(), query16.data(), bytes.data()};
  }
};

// A graph ready to be walked; it keeps the arrays that it reads. What is behind the first n rows is not looked at.
class Walker {
 public:
  Walker(int64_t n, Array<int32_t> neighbours, Array<int32_t> entry, Array<float> keys, int storage, Array<uint8_t> codes,
         Array<uint8_t> entry_codes, int64_t r, Array<float> step, Array<int8_t> projection, Array<float> scale,
         Array<float> offset, float largest, Array<uint32_t> versions)
      : floats{keys, step, scale, offset}, ids{neighbours, entry}, bytes{codes, entry_codes}, matrix(projection),
        versions(versions) {
    graph = {n,           int64_t(keys.shape(1)), int64_t(neighbours.shape(1)), int64_t(entry.shape(0)), neighbours.data(),
             entry.data(), keys.data(),           storage,                      codes.data(),            entry_codes.data(),
             r,            step.data(),           projection.data(),            scale.data(),            offset.data(),
             largest,      versions.size() ? versions.data() : nullptr};
  }

  // x [m, d] of norms near 1; scores [m, k], ids [m, k] and counts [m, 3] are written. `allowed` is [n], or empty if
  // every key may be a result. The number of visits is negative where fewer than `near` of the best keys may be one.
  void search(Array<float> x, int64_t depth, int64_t width, float margin, float refine, int64_t threads,
              Out<float> scores, Out<int64_t> ids, Out<int64_t> counts, Array<uint8_t> allowed, int64_t results,
              int64_t visits, int64_t near) const {
    const int64_t m = int64_t(x.shape(0)), k = int64_t(ids.shape(1));
    const Effort effort{k, depth, width, margin, refine, allowed.size() ? allowed.data() : nullptr, results, visits, near};
    const auto rows = [&](int64_t low, int64_t high) {
      // Kept for the next call: a query alone should not pay for memory.
      thread_local Memory memory;
      memory.prepare(graph, effort);
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

  // Keys `first` ... `first` + m - 1, whose keys and codes are in the arrays already, into the graph of those before;
  // `asked` [m, r or d]. The graph's own neighbours, blocks and versions are written.
  void insert(Out<int32_t> neighbours, Out<uint8_t> blocks, Out<uint32_t> versions, Array<uint8_t> codes,
              Array<int8_t> directions, int64_t degree, int64_t first, Array<float> asked, int64_t width, int64_t near,
              int64_t links, Array<float> weight) const {
    const int64_t voters = int64_t(weight.shape(0)), most = voters * graph.degree;
    const Growth growth{degree,       neighbours.data(),  blocks.data(), versions.data(),
                        codes.data(), directions.data(),  int64_t(directions.shape(1)) - 32};
    int64_t places = 2;
    while (places < 2 * most) places *= 2;
    std::vector<int32_t> ids(width), table_ids(places), row(graph.degree + 1);
    std::vector<uint64_t> nearest(width), voted(most);
    std::vector<float> table(places);
    Memory memory;
    memory.prepare(graph, Effort{width, width, width, 0, 0});
    GrowthScratch scratch{ids.data(), nearest.data(), voted.data(), table_ids.data(), table.data(), places, row.data(), weight.data()};
    nb::gil_scoped_release release;
    insert_keys(graph, growth, {width, near, voters, links}, first, int64_t(asked.shape(0)), asked.data(), int64_t(asked.shape(1)),
                memory.scratch, scratch);
  }

 private:
  // References to the arrays that the graph points into.
  std::vector<Array<float>> floats;
  std::vector<Array<int32_t>> ids;
  std::vector<Array<uint8_t>> bytes;
  Array<int8_t> matrix;
  Array<uint32_t> versions;
  Graph graph;
};

// Cells ready to be searched for a few queries; it keeps the arrays that it reads, and what holds the rows of cells.
class Scanner {
 public:
  Scanner(int64_t c, int64_t d, Array<float> projection, Array<float> codebook, bool twice, Array<float> weights,
          Array<float> reduce)
      : floats{projection, codebook, weights, reduce} {
    cells = {c, d, nullptr, 0, int64_t(codebook.shape(0)), data(projection), data(codebook), twice,
             int64_t(weights.shape(1)), data(weights), data(reduce)};
  }

  // The keys that are scanned; then, call by call, those that were added later, whose numbers follow. `keys` is empty
  // where the cells hold float32 keys.
  void part(nb::object owner, Array<uint64_t> rows, Array<int64_t> start, Array<int32_t> entries, Array<float> keys,
            int64_t first) {
    owners.push_back(owner), addresses.push_back(rows), floats.push_back(keys);
    starts.push_back(start), numbers.push_back(entries);
    parts.push_back({rows.data(), start.data(), entries.data(), data(keys), first, entries_before});
    entries_before += int64_t(entries.shape(0));
    cells.parts = parts.data(), cells.count = int64_t(parts.size());
  }

  // x [m, d] of norms near 1 and, if there is no linear router, scores of the cells [m, c], otherwise none;
  // scores [m, k] and ids [m, k] are written. `allowed` is [n] of all parts, or empty if every key may be a result.
  void search(Array<float> x, Array<float> cell_scores, int64_t probes, float temperature, float min_mass,
              int64_t keys, int64_t candidates, Out<float> scores, Out<int64_t> ids, Array<uint8_t> allowed) const {
    // Kept for the next call: a query alone should not pay for memory.
    thread_local struct {
      std::vector<uint64_t> chosen, candidates;
      std::vector<float> cell_scores, mass, inner, projected;
      std::vector<uint8_t> table;
    } memory;
    const int64_t m = int64_t(x.shape(0));
    const CellEffort effort{int64_t(ids.shape(1)), probes, temperature, min_mass, keys, candidates,
                            allowed.size() ? allowed.data() : nullptr};
    grow(memory.chosen, cells.c);
    grow(memory.cell_scores, m * cells.c);
    grow(memory.mass, cells.c);
    grow(memory.inner, m * cells.rank);
    grow(memory.projected, m * cells.r);
    grow(memory.table, 16 * (cells.r + 1));
    grow(memory.candidates, 2 * candidates + 2 * BLOCK);
    CellScratch scratch{memory.chosen.data(), memory.cell_scores.data(), memory.mass.data(),      memory.inner.data(),
                        memory.projected.data(), memory.table.data(), memory.candidates.data()};
    nb::gil_scoped_release release;
    search_cells(cells, effort, x.data(), m, cell_scores.size() ? cell_scores.data() : nullptr, scratch, scores.data(),
                 ids.data());
  }

 private:
  static const float* data(const Array<float>& array) { return array.size() ? array.data() : nullptr; }

  std::vector<nb::object> owners;
  std::vector<Array<uint64_t>> addresses;
  std::vector<Array<int64_t>> starts;   // of each part
  std::vector<Array<int32_t>> numbers;  // entries of each part
  std::vector<Array<float>> floats;
  std::vector<CellPart> parts;
  int64_t entries_before = 0;
  Cells cells;
};

}  // namespace

// A copy of an array that is not of the right type would be read after it is gone, or written in vain.
#define AS_IT_IS nb::arg().noconvert()

NB_MODULE(_native, module) {
  // What a program holds to its very end, in a thread for example, is no defect that its user has to read of.
  nb::set_leak_warnings(false);
  nb::class_<Walker>(module, "Walker")
      .def(nb::init<int64_t, Array<int32_t>, Array<int32_t>, Array<float>, int, Array<uint8_t>, Array<uint8_t>, int64_t,
                    Array<float>, Array<int8_t>, Array<float>, Array<float>, float, Array<uint32_t>>(),
           nb::arg(), AS_IT_IS, AS_IT_IS, AS_IT_IS, nb::arg(), AS_IT_IS, AS_IT_IS, nb::arg(), AS_IT_IS, AS_IT_IS,
           AS_IT_IS, AS_IT_IS, nb::arg(), AS_IT_IS)
      .def("search", &Walker::search, AS_IT_IS, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), AS_IT_IS,
           AS_IT_IS, AS_IT_IS, AS_IT_IS, nb::arg(), nb::arg(), nb::arg())
      .def("insert", &Walker::insert, AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS, nb::arg(), nb::arg(), AS_IT_IS,
           nb::arg(), nb::arg(), nb::arg(), AS_IT_IS);
  module.def("search_allowed", [](Array<float> keys, Array<uint8_t> allowed, Array<float> x, Out<float> scores,
                                  Out<int64_t> ids) {
    const int64_t n = int64_t(allowed.shape(0)), d = int64_t(keys.shape(1)), k = int64_t(ids.shape(1));
    nb::gil_scoped_release release;
    for (int64_t i = 0; i < int64_t(x.shape(0)); i++)
      search_allowed(keys.data(), n, d, allowed.data(), x.data() + i * d, k, scores.data() + i * k, ids.data() + i * k);
  }, AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS);
  // Queries x [m, d] of norms near 1, and for each the keys to score, [m, l]; `rows` is empty unless it says where keys are.
  module.def("search_listed", [](Array<float> keys, Array<uint64_t> rows, Array<int32_t> listed, Array<float> x,
                                 Out<float> scores, Out<int64_t> ids) {
    const int64_t d = int64_t(x.shape(1)), count = int64_t(listed.shape(1)), k = int64_t(ids.shape(1));
    nb::gil_scoped_release release;
    for (int64_t i = 0; i < int64_t(x.shape(0)); i++)
      search_listed(keys.data(), rows.size() ? rows.data() : nullptr, d, x.data() + i * d, listed.data() + i * count,
                    count, k, scores.data() + i * k, ids.data() + i * k);
  }, AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS);
  nb::class_<Scanner>(module, "Scanner")
      .def(nb::init<int64_t, int64_t, Array<float>, Array<float>, bool, Array<float>, Array<float>>(), nb::arg(), nb::arg(),
           AS_IT_IS, AS_IT_IS, nb::arg(), AS_IT_IS, AS_IT_IS)
      .def("part", &Scanner::part, nb::arg(), AS_IT_IS, AS_IT_IS, AS_IT_IS, AS_IT_IS, nb::arg())
      .def("search", &Scanner::search, AS_IT_IS, AS_IT_IS, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), AS_IT_IS,
           AS_IT_IS, AS_IT_IS);
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
