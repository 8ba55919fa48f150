// Inner products of codes and keys, for the processor that the file including this is compiled for.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "walk.hpp"

namespace amips::AMIPS_ISA {
namespace {

constexpr int64_t LINE = 64;  // bytes that memory is fetched in

inline void fetch(const void* at, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += LINE) __builtin_prefetch(static_cast<const char*>(at) + b);
}

#if defined(__AVX2__)
inline float total(__m256 parts) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(parts), _mm256_extractf128_ps(parts, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
#endif

inline float dot(const float* a, const float* b, int64_t d) {
  int64_t j = 0;
  float sum = 0;
#if defined(__AVX2__)
  __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
  for (; j + 32 <= d; j += 32) {
    s0 = _mm256_fmadd_ps(_mm256_loadu_ps(a + j), _mm256_loadu_ps(b + j), s0);
    s1 = _mm256_fmadd_ps(_mm256_loadu_ps(a + j + 8), _mm256_loadu_ps(b + j + 8), s1);
    s2 = _mm256_fmadd_ps(_mm256_loadu_ps(a + j + 16), _mm256_loadu_ps(b + j + 16), s2);
    s3 = _mm256_fmadd_ps(_mm256_loadu_ps(a + j + 24), _mm256_loadu_ps(b + j + 24), s3);
  }
  sum = total(_mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3)));
#else
  float parts[16] = {0};
  for (; j + 16 <= d; j += 16)
    for (int l = 0; l < 16; l++) parts[l] += a[j + l] * b[j + l];
  for (float part : parts) sum += part;
#endif
  for (; j < d; j++) sum += a[j] * b[j];
  return sum;
}

// <row, x> of so many rows [rows, d]; four at a time share the reading of x.
inline void dots(const float* matrix, int64_t rows, int64_t d, const float* x, float* out) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + 4 <= rows; i += 4) {
    const float *a = matrix + i * d, *b = a + d, *c = b + d, *e = c + d;
    __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
    int64_t j = 0;
    for (; j + 8 <= d; j += 8) {
      const __m256 v = _mm256_loadu_ps(x + j);
      s0 = _mm256_fmadd_ps(_mm256_loadu_ps(a + j), v, s0), s1 = _mm256_fmadd_ps(_mm256_loadu_ps(b + j), v, s1);
      s2 = _mm256_fmadd_ps(_mm256_loadu_ps(c + j), v, s2), s3 = _mm256_fmadd_ps(_mm256_loadu_ps(e + j), v, s3);
    }
    float sums[4] = {total(s0), total(s1), total(s2), total(s3)};
    for (; j < d; j++) sums[0] += a[j] * x[j], sums[1] += b[j] * x[j], sums[2] += c[j] * x[j], sums[3] += e[j] * x[j];
    std::memcpy(out + i, sums, sizeof sums);
  }
#endif
  for (; i < rows; i++) out[i] = dot(matrix + i * d, x, d);
}

// The same of m queries [m, d], to the last bit: out [m, rows]. Rows are read once for all of them.
inline void dots_of(const float* matrix, int64_t rows, int64_t d, const float* x, int64_t m, float* out) {
  for (int64_t i = 0; i < rows; i += 4) {
    const int64_t four = rows - i < 4 ? rows - i : 4;
    int64_t q = 0;
#if defined(__AVX2__)
    for (; four == 4 && q + 2 <= m; q += 2) {
      const float *a = matrix + i * d, *b = a + d, *c = b + d, *e = c + d, *y = x + q * d, *z = y + d;
      __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0, t0 = s0, t1 = s0, t2 = s0, t3 = s0;
      int64_t j = 0;
      for (; j + 8 <= d; j += 8) {
        const __m256 v = _mm256_loadu_ps(y + j), w = _mm256_loadu_ps(z + j);
        __m256 row = _mm256_loadu_ps(a + j);
        s0 = _mm256_fmadd_ps(row, v, s0), t0 = _mm256_fmadd_ps(row, w, t0), row = _mm256_loadu_ps(b + j);
        s1 = _mm256_fmadd_ps(row, v, s1), t1 = _mm256_fmadd_ps(row, w, t1), row = _mm256_loadu_ps(c + j);
        s2 = _mm256_fmadd_ps(row, v, s2), t2 = _mm256_fmadd_ps(row, w, t2), row = _mm256_loadu_ps(e + j);
        s3 = _mm256_fmadd_ps(row, v, s3), t3 = _mm256_fmadd_ps(row, w, t3);
      }
      float sums[8] = {total(s0), total(s1), total(s2), total(s3), total(t0), total(t1), total(t2), total(t3)};
      for (; j < d; j++) {
        sums[0] += a[j] * y[j], sums[1] += b[j] * y[j], sums[2] += c[j] * y[j], sums[3] += e[j] * y[j];
        sums[4] += a[j] * z[j], sums[5] += b[j] * z[j], sums[6] += c[j] * z[j], sums[7] += e[j] * z[j];
      }
      std::memcpy(out + q * rows + i, sums, 16), std::memcpy(out + (q + 1) * rows + i, sums + 4, 16);
    }
#endif
    for (; q < m; q++) dots(matrix + i * d, four, d, x + q * d, out + q * rows + i);
  }
}

// Sums of bytes[j] * row[j] for rows [rows, padded], a multiple of four; rows are within -63 ... 63, so that pairs
// fit into 16 bits.
inline void dots_bytes(const uint8_t* bytes, const int8_t* matrix, int64_t rows, int64_t padded, int32_t* out) {
#if defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < rows; i += 4) {
    const int8_t* row = matrix + i * padded;
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t j = 0; j < padded; j += 32) {
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + j));
      for (int l = 0; l < 4; l++) {
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + l * padded + j));
        sums[l] = _mm256_add_epi32(sums[l], _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
      }
    }
    const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), four);
  }
#else
  for (int64_t i = 0; i < rows; i++) {
    out[i] = 0;
    for (int64_t j = 0; j < padded; j++) out[i] += int32_t(bytes[j]) * matrix[i * padded + j];
  }
#endif
}

inline int32_t dot_codes(const int8_t* code, const int16_t* query, int64_t d) {
  int32_t sum = 0;
  for (int64_t j = 0; j < d; j++) sum += int32_t(code[j]) * query[j];
  return sum;
}

// Of two rows of numbers within -127 ... 127, a multiple of 32 of them.
inline int32_t dot_bytes(const int8_t* a, const int8_t* b, int64_t count) {
#if defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum = _mm256_setzero_si256();
  for (int64_t j = 0; j < count; j += 32) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + j));
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + j));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(v), _mm256_sign_epi8(w, v));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
  }
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
  int32_t sum = 0;
  for (int64_t j = 0; j < count; j++) sum += int32_t(a[j]) * b[j];
  return sum;
#endif
}

// Of one such row with two others, which share the reading of it.
inline void dots_of_two(const int8_t* a, const int8_t* b, const int8_t* c, int64_t count, int32_t* out) {
#if defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i first = _mm256_setzero_si256(), second = first;
  for (int64_t j = 0; j < count; j += 32) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + j)), size = _mm256_abs_epi8(v);
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + j));
    const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c + j));
    first = _mm256_add_epi32(first, _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(w, v)), ones));
    second = _mm256_add_epi32(second, _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(u, v)), ones));
  }
  const __m256i pairs = _mm256_hadd_epi32(first, second), four = _mm256_hadd_epi32(pairs, pairs);
  const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  out[0] = _mm_cvtsi128_si32(both), out[1] = _mm_extract_epi32(both, 1);
#else
  out[0] = dot_bytes(a, b, count), out[1] = dot_bytes(a, c, count);
#endif
}

// Scores of 32 neighbours. Row p of a block, 64 bytes, has values 4 p ... 4 p + 3 of each: two bytes, of which the
// low halves are the first two values and the high halves the others.
inline void score_block(const uint8_t* block, const int8_t* query, int64_t r, int32_t* out) {
#if defined(__AVX2__)
  const __m256i low = _mm256_set1_epi8(15);
  __m256i a0 = _mm256_setzero_si256(), a1 = a0, b0 = a0, b1 = a0;
  for (int64_t p = 0; p < r / 4; p++) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 64 * p));
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 64 * p + 32));
    int16_t first, second;
    std::memcpy(&first, query + 4 * p, 2);
    std::memcpy(&second, query + 4 * p + 2, 2);
    const __m256i q0 = _mm256_set1_epi16(first), q1 = _mm256_set1_epi16(second);
    a0 = _mm256_add_epi16(a0, _mm256_maddubs_epi16(_mm256_and_si256(v, low), q0));
    b0 = _mm256_add_epi16(b0, _mm256_maddubs_epi16(_mm256_and_si256(w, low), q0));
    a1 = _mm256_add_epi16(a1, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(v, 4), low), q1));
    b1 = _mm256_add_epi16(b1, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 4), low), q1));
  }
  const __m256i first = _mm256_add_epi16(a0, a1), second = _mm256_add_epi16(b0, b1);
  __m256i* to = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(to, _mm256_cvtepi16_epi32(_mm256_castsi256_si128(first)));
  _mm256_storeu_si256(to + 1, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(first, 1)));
  _mm256_storeu_si256(to + 2, _mm256_cvtepi16_epi32(_mm256_castsi256_si128(second)));
  _mm256_storeu_si256(to + 3, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(second, 1)));
#else
  int16_t sums[BLOCK] = {0};
  for (int64_t p = 0; p < r / 4; p++) {
    const uint8_t* row = block + 64 * p;
    const int16_t q0 = query[4 * p], q1 = query[4 * p + 1], q2 = query[4 * p + 2], q3 = query[4 * p + 3];
    for (int l = 0; l < BLOCK; l++)
      sums[l] += int16_t((row[2 * l] & 15) * q0 + (row[2 * l + 1] & 15) * q1 + (row[2 * l] >> 4) * q2 +
                         (row[2 * l + 1] >> 4) * q3);
  }
  for (int l = 0; l < BLOCK; l++) out[l] = sums[l];
#endif
}

// Which of 32 scores reach a bound, as bits.
inline uint32_t reaching(const int32_t* scores, int32_t bound) {
  uint32_t mask = 0;
#if defined(__AVX2__)
  const __m256i below = _mm256_set1_epi32(bound - 1);
  for (int part = 0; part < 4; part++) {
    const __m256i s = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scores + 8 * part));
    mask |= uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(s, below)))) << (8 * part);
  }
#else
  for (int l = 0; l < BLOCK; l++) mask |= uint32_t(scores[l] >= bound) << l;
#endif
  return mask;
}

// Scores of 32 entries of a cell, from the part of the score that each value of a code has, [2 pairs, 16]. Codes are
// in the order of FAISS's FastScan: 32 bytes for two values, 16 each, the low halves of the first 16 entries
// (0, 8, 1, 9, ...) and the high halves of the others. A sum fits into 16 bits: the caller sees to it.
inline void score_tables(const uint8_t* codes, const uint8_t* table, int64_t pairs, uint16_t* out) {
#if defined(__AVX2__)
  const __m256i low = _mm256_set1_epi8(15);
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (int64_t p = 0; p < pairs; p++) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * p));
    const __m256i parts = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table + 32 * p));
    const __m256i first = _mm256_shuffle_epi8(parts, _mm256_and_si256(both, low));
    const __m256i second = _mm256_shuffle_epi8(parts, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
    // Bytes are added in pairs as numbers of 16 bits, and what the upper ones add to these is taken off at the end.
    a = _mm256_add_epi16(a, first), b = _mm256_add_epi16(b, _mm256_srli_epi16(first, 8));
    c = _mm256_add_epi16(c, second), d = _mm256_add_epi16(d, _mm256_srli_epi16(second, 8));
  }
  a = _mm256_sub_epi16(a, _mm256_slli_epi16(b, 8)), c = _mm256_sub_epi16(c, _mm256_slli_epi16(d, 8));
  const __m256i sums[4] = {a, b, c, d};
  for (int part = 0; part < 4; part++) {
    const __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(sums[part]), _mm256_extracti128_si256(sums[part], 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8 * part), sum);
  }
#else
  for (int l = 0; l < BLOCK; l++) out[l] = 0;
  for (int64_t p = 0; p < 2 * pairs; p++)
    for (int l = 0; l < 16; l++) {
      const uint8_t both = codes[16 * p + l];
      const int entry = l / 2 + (l % 2 ? 8 : 0);
      out[entry] = uint16_t(out[entry] + table[16 * p + (both & 15)]);
      out[entry + 16] = uint16_t(out[entry + 16] + table[16 * p + (both >> 4)]);
    }
#endif
}

// The same of scores of 16 bits; a bound of 65536 is reached by none.
inline uint32_t reaching(const uint16_t* scores, uint32_t bound) {
  if (bound > 65535) return 0;
  uint32_t mask = 0;
#if defined(__AVX2__)
  const __m256i least = _mm256_set1_epi16(int16_t(bound));
  const __m256i* at = reinterpret_cast<const __m256i*>(scores);
  const __m256i s = _mm256_loadu_si256(at), t = _mm256_loadu_si256(at + 1);
  const __m256i a = _mm256_cmpeq_epi16(_mm256_max_epu16(s, least), s), b = _mm256_cmpeq_epi16(_mm256_max_epu16(t, least), t);
  // Packing goes lane by lane: the middle parts change places.
  mask = uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8)));
#else
  for (int l = 0; l < BLOCK; l++) mask |= uint32_t(scores[l] >= bound) << l;
#endif
  return mask;
}

}  // namespace
}  // namespace amips::AMIPS_ISA
