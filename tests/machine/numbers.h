// Numbers of fewer than 32 bits, and how registers hold them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

template <class To, class From> inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same size");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

inline float from_bf16(u16 x) { return bits<float>((u32)x << 16); }
inline u16 to_bf16(float x) {
  const u32 y = bits<u32>(x);
  if (x != x) return 0x7fff;
  return (u16)((y + 0x7fff + (y >> 16 & 1)) >> 16);
}

inline float from_f16(u16 x) { return (float)bits<_Float16>(x); }
inline u16 to_f16(float x) { return bits<u16>((_Float16)x); }

// e4m3: 4 bits of exponent, 3 of mantissa, no infinity; a full pattern is NaN.
inline float from_e4m3(u8 x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  float y = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
  if ((x & 0x7f) == 0x7f) y = NAN;
  return x & 0x80 ? -y : y;
}
inline u8 to_e4m3(float x) {  // to the nearest even one, and to the largest where it is larger
  const u8 sign = bits<u32>(x) >> 31 << 7;
  if (x != x) return 0x7f;
  float size = std::fabs(x);
  if (size >= 448.f) return sign | 0x7e;
  if (size == 0.f) return sign;
  int exponent;
  std::frexp(size, &exponent);
  const int unit = exponent - 4 < -9 ? -9 : exponent - 4;  // the last bit's weight
  const int count = (int)std::nearbyint(std::ldexp(size, -unit));
  if (unit == -9) return sign | (u8)count;  // subnormal, or 8: the smallest normal one
  if (count == 16) return sign | (u8)((unit + 11) << 3);
  return sign | (u8)((unit + 10) << 3 | (count - 8));
}

inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }
