// Edges of a graph: what `amips.graph.edges` says in numpy, compiled.
#include "edges.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

namespace amips {
namespace {

constexpr int64_t ROWS = 256;  // of keys that a thread takes at a time

float dot(const float* a, const float* b, int64_t d) {
  float parts[16] = {0}, sum = 0;
  int64_t j = 0;
  for (; j + 16 <= d; j += 16)
    for (int l = 0; l < 16; l++) parts[l] += a[j + l] * b[j + l];
  for (float part : parts) sum += part;
  for (; j < d; j++) sum += a[j] * b[j];
  return sum;
}

}  // namespace

void parallel(int64_t count, int64_t step, int64_t threads, const std::function<void(int64_t, int64_t)>& work) {
  std::atomic<int64_t> next{0};
  std::exception_ptr problem;
  std::mutex lock;
  const auto run = [&] {
    try {
      for (int64_t low = next.fetch_add(step); low < count; low = next.fetch_add(step))
        work(low, std::min(count, low + step));
    } catch (...) {  // full memory, above all: the caller is told, the others end
      const std::lock_guard<std::mutex> guard(lock);
      problem = std::current_exception();
      next = count;
    }
  };
  threads = std::min(threads, (count + step - 1) / step);
  std::vector<std::thread> others;
  try {
    others.reserve(size_t(std::max<int64_t>(0, threads - 1)));
    for (int64_t t = 1; t < threads; t++) others.emplace_back(run);
  } catch (const std::exception&) {  // no more threads to be had: those there are do the work
  }
  run();
  for (auto& other : others) other.join();
  if (problem) std::rethrow_exception(problem);
}

void prune(const float* vectors, int64_t n, int64_t d, const int32_t* candidates, int64_t width, int64_t degree,
           bool fill, bool ordered, int64_t threads, int32_t* out) {
  parallel(n, ROWS, threads, [&](int64_t low, int64_t high) {
    std::vector<std::pair<float, int32_t>> near;
    std::vector<int32_t> kept, left;
    for (int64_t i = low; i < high; i++) {
      const float* own = vectors + i * d;
      near.clear(), kept.clear(), left.clear();
      for (int64_t a = 0; a < width; a++) {
        const int32_t j = candidates[i * width + a];
        if (j >= 0 && j != i) near.emplace_back(-dot(own, vectors + j * d, d), j);
      }
      if (!ordered) std::sort(near.begin(), near.end());
      for (const auto& [score, j] : near) {
        if (int64_t(kept.size()) == degree) break;
        if (std::find(kept.begin(), kept.end(), j) != kept.end()) continue;
        if (std::find(left.begin(), left.end(), j) != left.end()) continue;
        const float* y = vectors + int64_t(j) * d;
        const bool hidden = std::any_of(kept.begin(), kept.end(), [&, score = score](int32_t between) {
          return dot(vectors + int64_t(between) * d, y, d) >= -score;
        });
        (hidden ? left : kept).push_back(j);
      }
      for (size_t a = 0; fill && a < left.size() && int64_t(kept.size()) < degree; a++) kept.push_back(left[a]);
      std::copy(kept.begin(), kept.end(), out + i * degree);
      std::fill(out + i * degree + kept.size(), out + (i + 1) * degree, -1);
    }
  });
}

void together(const int32_t* top, int64_t length, const int64_t* start, const int64_t* places, int64_t n, int64_t most,
              const float* weight, int64_t threads, int32_t* out) {
  parallel(n, ROWS, threads, [&](int64_t low, int64_t high) {
    std::vector<std::pair<int32_t, float>> met;
    std::vector<std::pair<float, int32_t>> totals;
    for (int64_t i = low; i < high; i++) {
      met.clear(), totals.clear();
      for (int64_t p = start[i]; p < start[i + 1]; p++) {
        const int32_t* row = top + places[p] / length * length;
        for (int64_t rank = 0; rank < length; rank++)
          if (row[rank] != i && row[rank] >= 0) met.emplace_back(row[rank], weight[places[p] % length] * weight[rank]);
      }
      std::stable_sort(met.begin(), met.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      for (size_t a = 0; a < met.size();) {
        float total = 0;
        const int32_t key = met[a].first;
        for (; a < met.size() && met[a].first == key; a++) total += met[a].second;
        totals.emplace_back(-total, key);
      }
      const int64_t count = std::min<int64_t>(most, totals.size());
      std::partial_sort(totals.begin(), totals.begin() + count, totals.end());
      for (int64_t a = 0; a < most; a++) out[i * most + a] = a < count ? totals[a].second : -1;
    }
  });
}

void pack(const uint8_t* codes, int64_t r, const int32_t* ids, int64_t rows, int64_t degree, int64_t threads,
          uint8_t* out) {
  parallel(rows, ROWS, threads, [&](int64_t low, int64_t high) {
    for (int64_t a = low * degree; a < high * degree; a++) {
      const int64_t lane = a % 32;
      uint8_t* to = out + (a - lane) * r / 2 + 2 * lane;
      const uint8_t* from = codes + std::max<int64_t>(0, ids[a]) * (r / 2);  // what of no key is never looked at
      for (int64_t p = 0; p < r / 4; p++) std::memcpy(to + 64 * p, from + 2 * p, 2);
    }
  });
}

}  // namespace amips
