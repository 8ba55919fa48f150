// Compiled once for every processor and once for those with AVX2, as walk.cpp is.
#include "insert.hpp"

#include <cstring>

#include "kernels.hpp"
#include "rows.hpp"
#include "select.hpp"

namespace amips::AMIPS_ISA {
namespace {

class Insert {
 public:
  Insert(const Graph& graph, const Growth& growth, const GrowthEffort& effort, Scratch& walk, GrowthScratch& scratch)
      : g(graph), growth(growth), effort(effort), walk(walk), s(scratch) {}

  void add(int64_t key, const float* asked) {
    own = int32_t(key), size = linked = 0;
    find(asked);
    const int64_t half = (growth.degree + 1) / 2, near = count < effort.near ? count : effort.near;
    for (int64_t a = 0; a < near && size < half; a++) keep(key_of(s.near[a]));
    const int64_t voted = vote();
    for (int64_t a = 0; a < voted && size < growth.degree; a++) keep(key_of(s.voted[a]));
    const int64_t kept = size;
    for (int64_t a = 0; a < kept; a++) fetch(g.neighbours + int64_t(s.row[a]) * g.degree, 4 * g.degree);
    for (int64_t a = 0; a < kept; a++) {
      fetch_neighbours(a + 1 < kept ? s.row[a + 1] : key_of(s.near[0]));
      link(s.row[a], false);
    }
    for (int64_t a = 0; a < count && linked < effort.links; a++) {
      if (a + 1 < count) fetch_neighbours(key_of(s.near[a + 1]));
      if (!had(key_of(s.near[a]), kept)) link(key_of(s.near[a]), false);
    }
    if (!linked && count) link(key_of(s.near[0]), true);
    for (int64_t a = 0; a < count && size < growth.degree; a++)
      if (!has(key_of(s.near[a]))) s.row[size++] = key_of(s.near[a]);
    write();
  }

 private:
  const Graph& g;
  const Growth& growth;
  const GrowthEffort& effort;
  Scratch& walk;
  GrowthScratch& s;
  int32_t own = 0;
  int64_t count = 0;   // keys found
  int64_t size = 0;    // neighbours so far
  int64_t linked = 0;  // keys that have this one as a neighbour

  static int32_t key_of(uint64_t entry) { return int32_t(~uint32_t(entry)); }
  static uint64_t packed(float value, int32_t key) { return uint64_t(ordered(value)) << 32 | uint32_t(~uint32_t(key)); }

  const int8_t* direction(int64_t key) const { return growth.directions + key * (growth.length + 32); }
  void fetch_direction(int64_t key) const { fetch(direction(key), growth.length + 4); }
  void fetch_neighbours(int64_t key) const {  // their directions: those of one key while another is looked at
    const int32_t* row = g.neighbours + key * g.degree;
    for (int64_t a = 0; a < growth.degree && row[a] >= 0; a++) fetch_direction(row[a]);
  }
  float scale(const int8_t* direction) const {
    float value;
    std::memcpy(&value, direction + growth.length, 4);
    return value;
  }
  float cosine(int64_t a, int64_t b) const {
    const int8_t *one = direction(a), *other = direction(b);
    return float(dot_bytes(one, other, growth.length)) * (scale(one) * scale(other));
  }
  bool had(int32_t key, int64_t among) const {
    for (int64_t a = 0; a < among; a++)
      if (s.row[a] == key) return true;
    return false;
  }
  bool has(int32_t key) const { return had(key, size); }

  // What a walk finds, by the angle; of equals the lower number first.
  void find(const float* asked) {
    const Effort wide{effort.width, effort.width + 1, effort.width, 0, 0};
    count = nearest(g, wide, asked, walk, s.ids);
    for (int64_t a = 0; a < count; a++) fetch_direction(s.ids[a]);
    for (int64_t a = 0; a < count; a++) s.near[a] = packed(cosine(own, s.ids[a]), s.ids[a]);
    sort_down(s.near, count);
  }

  // Take a candidate as a neighbour unless one that was taken is at least as near to it.
  void keep(int32_t key) {
    if (key == own || has(key)) return;
    const float score = cosine(own, key);
    for (int64_t a = 0; a < size; a++)
      if (cosine(s.row[a], key) >= score) return;
    s.row[size++] = key;
  }

  // Neighbours of the nearest keys, those that most of them have first; how many. These carry the edges of the log.
  int64_t vote() {
    for (int64_t a = 0; a < s.places; a++) s.table_ids[a] = -1;
    const int64_t voters = count < effort.voters ? count : effort.voters;
    for (int64_t a = 0; a < voters; a++) fetch(g.neighbours + int64_t(key_of(s.near[a])) * g.degree, 4 * g.degree);
    for (int64_t a = 0; a < voters; a++) {
      const int32_t* row = g.neighbours + int64_t(key_of(s.near[a])) * g.degree;
      for (int64_t b = 0; b < growth.degree && row[b] >= 0; b++) {
        uint64_t at = uint32_t(row[b]) * 2654435769u;
        for (at &= uint64_t(s.places - 1); s.table_ids[at] >= 0 && s.table_ids[at] != row[b];) at = (at + 1) & uint64_t(s.places - 1);
        if (s.table_ids[at] < 0) s.table_ids[at] = row[b], s.table[at] = 0;
        s.table[at] += s.weight[a];
      }
    }
    int64_t voted = 0;
    for (int64_t a = 0; a < s.places; a++)
      if (s.table_ids[a] >= 0) s.voted[voted++] = packed(s.table[a], s.table_ids[a]);
    sort_down(s.voted, voted);
    if (voted > effort.near) voted = effort.near;
    for (int64_t a = 0; a < voted; a++) fetch_direction(key_of(s.voted[a]));
    return voted;
  }

  // Make the new key a neighbour of `key`: in a free place, or in that of one to which it is nearer, which it then has
  // as a neighbour itself, so that whatever could be reached still can. With `forced` in any case.
  void link(int32_t key, bool forced) {
    const int32_t* row = g.neighbours + int64_t(key) * g.degree;
    int64_t used = 0, place = -1;
    while (used < growth.degree && row[used] >= 0) used++;
    if (used < growth.degree) {
      put(key, used);
      return;
    }
    float best = 0;
    bool known = false;
    const int8_t *ours = direction(own), *theirs = direction(key);
    const float own_scale = scale(ours), key_scale = scale(theirs);
    for (int64_t a = 0; a < used; a++) {
      int32_t products[2];
      const int8_t* other = direction(row[a]);
      dots_of_two(other, ours, theirs, growth.length, products);
      const float one = scale(other);
      const float nearer = float(products[0]) * (own_scale * one) - float(products[1]) * (key_scale * one);
      if ((place >= 0 || !forced) && nearer < best) continue;
      const bool mine = has(row[a]);
      if (!mine && size == growth.degree && !forced) continue;
      if (place >= 0 && nearer == best) continue;
      place = a, best = nearer, known = mine;
    }
    if (place < 0) return;
    if (!known) s.row[size < growth.degree ? size++ : size - 1] = row[place];
    put(key, place);
  }

  void put(int64_t key, int64_t place) {
    linked++;
    while_odd(growth.versions + key, [&] {
      growth.neighbours[key * g.degree + place] = own;
      if (g.storage == LEAN) pack(key, place, own);
    });
  }

  void pack(int64_t key, int64_t place, int64_t neighbour) {
    const int64_t lane = place % BLOCK;
    uint8_t* to = growth.blocks + (key * g.degree + place - lane) * g.r / 2 + 2 * lane;
    const uint8_t* from = growth.codes + neighbour * (g.r / 2);
    for (int64_t p = 0; p < g.r / 4; p++) std::memcpy(to + 64 * p, from + 2 * p, 2);
  }

  // The row of the new key, which nobody reads yet.
  void write() {
    int32_t* row = growth.neighbours + int64_t(own) * g.degree;
    for (int64_t a = 0; a < g.degree; a++) row[a] = a < size ? s.row[a] : -1;
    for (int64_t a = 0; g.storage == LEAN && a < size; a++) pack(own, a, row[a]);
  }
};

}  // namespace

void insert(Graph graph, const Growth& growth, const GrowthEffort& effort, int64_t first, int64_t count, const float* asked,
            int64_t asked_width, Scratch& walk, GrowthScratch& scratch) {
  graph.versions = nullptr;  // nobody else writes
  Insert one(graph, growth, effort, walk, scratch);
  for (int64_t a = 0; a < count; a++) {
    graph.n = first + a;
    one.add(first + a, asked + a * asked_width);
  }
}

}  // namespace amips::AMIPS_ISA
