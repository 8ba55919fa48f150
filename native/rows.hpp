// Rows that one thread writes while others read them (a sequence lock for each row).
#pragma once
#include <sched.h>

#include <cstdint>

namespace amips::AMIPS_ISA {
namespace {

constexpr int SPINS = 1 << 10;  // before a reader lets others run, the writer among them

// Read until nothing was written meanwhile: a version is odd while its row is written.
template <typename Read>
inline void while_unchanged(const uint32_t* version, const Read& read) {
  for (int turn = 1;; turn++) {
    const uint32_t before = __atomic_load_n(version, __ATOMIC_ACQUIRE);
    if (!(before & 1)) {
      read();
      __atomic_thread_fence(__ATOMIC_ACQUIRE);
      if (__atomic_load_n(version, __ATOMIC_RELAXED) == before) return;
    }
    if (turn % SPINS == 0) sched_yield();
  }
}

// Write a row, which readers then read again.
template <typename Write>
inline void while_odd(uint32_t* version, const Write& write) {
  const uint32_t before = __atomic_load_n(version, __ATOMIC_RELAXED);
  __atomic_store_n(version, before + 1, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  write();
  __atomic_store_n(version, before + 2, __ATOMIC_RELEASE);
}

}  // namespace
}  // namespace amips::AMIPS_ISA
