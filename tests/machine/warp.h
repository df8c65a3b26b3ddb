// A warp: its registers, where its lanes are, and the instructions that concern no other warp.
#pragma once
#include <deque>

#include "program.h"
#include "shared.h"

constexpr u32 ALL = ~0u;

enum class Wait { nothing, lanes, mbarrier, named_barrier, cluster, warpgroup, copies };

// Lanes that are at the same instruction.
struct Group {
  u32 mask;
  i32 at;
  Wait wait = Wait::nothing;
  u32 barrier = 0, phase = 0;  // what it waits for
  bool idle = false;           // could not go on in this turn
};

// What a committed group of wgmmas reads from shared memory.
struct Range { u32 offset, bytes; };

// A copy out of shared memory that a lane has started and not waited for.
struct Sent {
  int lane;
  u32 group;
  Range range;
};

struct Block;

struct Warp {
  Block* block;
  int number, agent;
  std::vector<u32> registers;  // [word][lane]
  std::vector<u32> predicates;
  std::vector<Group> groups;
  Clock clock;
  std::vector<Range> open;                  // of wgmmas not committed
  std::deque<std::vector<Range>> committed;
  std::vector<std::vector<u8>> local;
  std::vector<Sent> sent;
  u32 bulk_groups[32] = {};                 // committed, by lane
  const Instruction* at_product = nullptr;  // a wgmma that waits for the other warps of its warpgroup,
  bool released = false;                    // and one that they have made since
  u32 meeting_round = 0;

  u32* word(i32 slot) { return registers.data() + (size_t)slot * 32; }
  void tick() { clock.seen[agent]++; }

  template <class T> T get(i32 slot, int lane) {
    if constexpr (sizeof(T) == 8) return bits<T>(word(slot)[lane] | (u64)word(slot + 1)[lane] << 32);
    else if constexpr (sizeof(T) == 4) return bits<T>(word(slot)[lane]);
    else if constexpr (sizeof(T) == 2) return bits<T>((u16)word(slot)[lane]);
    else return bits<T>((u8)word(slot)[lane]);
  }
  template <class T> void set(i32 slot, int lane, T x) {
    if (slot < 0) return;
    if constexpr (sizeof(T) == 8) {
      word(slot)[lane] = (u32)bits<u64>(x);
      word(slot + 1)[lane] = (u32)(bits<u64>(x) >> 32);
    } else if constexpr (sizeof(T) == 4) {
      word(slot)[lane] = bits<u32>(x);
    } else if constexpr (sizeof(T) == 2) {
      word(slot)[lane] = bits<u16>(x);
    } else {
      word(slot)[lane] = bits<u8>(x);
    }
  }
  u64 address(const i32* operand, int lane) {  // base, whether it has 64 bits, offset
    return (operand[1] ? get<u64>(operand[0], lane) : get<u32>(operand[0], lane)) + (i64)operand[2];
  }
};

template <class F> inline void each_lane(u32 mask, F f) {
  if (mask == ALL) {
    for (int lane = 0; lane < 32; lane++) f(lane);
  } else {
    for (u32 left = mask; left; left &= left - 1) f(__builtin_ctz(left));
  }
}

// --- arithmetic: the result of an instruction in its first operand

template <class To, class From = To, class F> void one(Warp& w, const i32* o, u32 mask, F f) {
  each_lane(mask, [&](int l) { w.set<To>(o[0], l, f(w.get<From>(o[1], l))); });
}
template <class To, class From = To, class F> void two(Warp& w, const i32* o, u32 mask, F f) {
  each_lane(mask, [&](int l) { w.set<To>(o[0], l, f(w.get<From>(o[1], l), w.get<From>(o[2], l))); });
}
template <class To, class From = To, class Third = From, class F> void three(Warp& w, const i32* o, u32 mask, F f) {
  each_lane(mask, [&](int l) {
    w.set<To>(o[0], l, f(w.get<From>(o[1], l), w.get<From>(o[2], l), w.get<Third>(o[3], l)));
  });
}

// f with a value of the C++ type of an integer type.
template <class F> void as_integer(Type t, F f) {
  switch (t) {
    case Type::u8_: case Type::b8: return f(u8());
    case Type::s8: return f((int8_t)0);
    case Type::u16_: case Type::b16: return f(u16());
    case Type::s16: return f(i16());
    case Type::u32_: case Type::b32: return f(u32());
    case Type::s32: return f(i32());
    case Type::u64_: case Type::b64: return f(u64());
    case Type::s64: return f(i64());
    default: throw Fault(text("type %d has no such operation", (int)t));
  }
}
template <class F> void as_number(Type t, F f) {
  if (t == Type::f32) return f(0.f);
  if (t == Type::f64) return f(0.);
  as_integer(t, f);
}

// Two 16-bit halves of a register.
template <class F> void halves(Warp& w, const Instruction& in, const i32* o, u32 mask, F f) {
  const bool half = in.kind() == Type::f16x2;
  each_lane(mask, [&](int l) {
    const u32 x = w.get<u32>(o[1], l), y = w.get<u32>(o[2], l);
    u32 made = 0;
    for (int i = 0; i < 32; i += 16) {
      const float a = half ? from_f16(x >> i) : from_bf16(x >> i), b = half ? from_f16(y >> i) : from_bf16(y >> i);
      made |= (u32)(half ? to_f16(f(a, b)) : to_bf16(f(a, b))) << i;
    }
    w.set<u32>(o[0], l, made);
  });
}

inline float number(Type t, u32 x) {
  return t == Type::f16 ? from_f16(x) : t == Type::bf16 ? from_bf16(x) : bits<float>(x);
}

template <class T> bool compare(int how, T a, T b) {
  const bool unordered = a != a || b != b;
  switch (how) {
    case 0: return a == b && !unordered;
    case 1: return a != b && !unordered;
    case 2: case 6: return a < b;
    case 3: case 7: return a <= b;
    case 4: case 8: return a > b;
    case 5: case 9: return a >= b;
    case 10: return a == b || unordered;
    case 11: return a != b || unordered;
    case 12: return a < b || unordered;
    case 13: return a <= b || unordered;
    case 14: return a > b || unordered;
    case 15: return a >= b || unordered;
    case 16: return !unordered;
    default: return unordered;
  }
}

template <class From> float rounded(int how, From x) {
  switch (how & 3) {  // rn, rz, rm, rp, and the same to an integer
    case 1: return (float)std::trunc((double)x);
    case 2: return (float)std::floor((double)x);
    case 3: return (float)std::ceil((double)x);
    default: return (float)std::nearbyint((double)x);
  }
}

inline void convert(Warp& w, const Instruction& in, const i32* o, u32 mask) {
  const Type to = in.kind(), from = (Type)in.type2;
  const int how = in.mod & 15;
  each_lane(mask, [&](int l) {
    if (to == Type::bf16x2 || to == Type::f16x2) {
      u32 high, low;
      if (from == Type::e4m3x2) {
        const u32 x = w.get<u16>(o[1], l);
        high = to_f16(from_e4m3(x >> 8)), low = to_f16(from_e4m3(x));
      } else {
        const float a = w.get<float>(o[1], l), b = w.get<float>(o[2], l);
        high = to == Type::f16x2 ? to_f16(a) : to_bf16(a), low = to == Type::f16x2 ? to_f16(b) : to_bf16(b);
      }
      return w.set<u32>(o[0], l, high << 16 | low);
    }
    if (to == Type::e4m3x2)
      return w.set<u16>(o[0], l, to_e4m3(w.get<float>(o[1], l)) << 8 | to_e4m3(w.get<float>(o[2], l)));
    if (from == Type::f32 || from == Type::f16 || from == Type::bf16) {
      const float x = number(from, w.get<u32>(o[1], l));
      if (to == Type::f32) return w.set<float>(o[0], l, how >= 4 ? rounded(how, x) : x);
      if (to == Type::f16) return w.set<u16>(o[0], l, to_f16(x));
      if (to == Type::bf16) return w.set<u16>(o[0], l, to_bf16(x));
      const double y = rounded(how, x);  // out of range goes to the nearest end, NaN to 0
      return as_integer(to, [&](auto t) {
        typedef decltype(t) T;
        const double lowest = (double)std::numeric_limits<T>::min(), highest = (double)std::numeric_limits<T>::max();
        const T made = y != y ? 0 : y <= lowest ? std::numeric_limits<T>::min() : y >= highest ? std::numeric_limits<T>::max() : (T)y;
        if (sizeof(T) == 8) w.set<u64>(o[0], l, (u64)(i64)made);
        else w.set<u32>(o[0], l, (u32)made);
      });
    }
    as_integer(from, [&](auto f) {
      const auto x = w.get<decltype(f)>(o[1], l);
      if (to == Type::f32) return w.set<float>(o[0], l, (float)x);
      if (to == Type::f64) return w.set<double>(o[0], l, (double)x);
      as_integer(to, [&](auto t) {
        if (sizeof t == 8) w.set<u64>(o[0], l, (u64)(i64)x);
        else w.set<u32>(o[0], l, (u32)(decltype(t))x);
      });
    });
  });
}

inline u32 permuted(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 made = 0;
  for (int i = 0; i < 4; i++) {
    const u32 nibble = selector >> 4 * i & 15;
    u32 byte = bytes >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    made |= byte << 8 * i;
  }
  return made;
}

// Whether it was one of these.
inline bool arithmetic(Warp& w, const Instruction& in, const i32* o, u32 mask) {
  const Type t = in.kind();
  const bool packed = t == Type::f16x2 || t == Type::bf16x2;
  switch (in.code()) {
    case Op::mov_:
      if (is_wide(t)) one<u64>(w, o, mask, [](u64 x) { return x; });
      else one<u32>(w, o, mask, [](u32 x) { return x; });
      return true;
    case Op::pack_:
      each_lane(mask, [&](int l) {
        if (is_wide(t)) w.set<u64>(o[0], l, w.get<u32>(o[1], l) | (u64)w.get<u32>(o[2], l) << 32);
        else w.set<u32>(o[0], l, w.get<u16>(o[1], l) | (u32)w.get<u16>(o[2], l) << 16);
      });
      return true;
    case Op::unpack_:
      each_lane(mask, [&](int l) {
        if (is_wide(t)) {
          const u64 x = w.get<u64>(o[2], l);
          w.set<u32>(o[0], l, (u32)x), w.set<u32>(o[1], l, (u32)(x >> 32));
        } else {
          const u32 x = w.get<u32>(o[2], l);
          w.set<u16>(o[0], l, (u16)x), w.set<u16>(o[1], l, (u16)(x >> 16));
        }
      });
      return true;
    case Op::add_:
      if (packed) halves(w, in, o, mask, [](float a, float b) { return a + b; });
      else as_number(t, [&](auto x) { typedef decltype(x) T; two<T>(w, o, mask, [](T a, T b) { return (T)(a + b); }); });
      return true;
    case Op::sub_:
      if (packed) halves(w, in, o, mask, [](float a, float b) { return a - b; });
      else as_number(t, [&](auto x) { typedef decltype(x) T; two<T>(w, o, mask, [](T a, T b) { return (T)(a - b); }); });
      return true;
    case Op::mul_: case Op::mul_lo_:
      if (packed) halves(w, in, o, mask, [](float a, float b) { return a * b; });
      else as_number(t, [&](auto x) { typedef decltype(x) T; two<T>(w, o, mask, [](T a, T b) { return (T)(a * b); }); });
      return true;
    case Op::mul_hi_:
      if (t == Type::s32) two<i32>(w, o, mask, [](i32 a, i32 b) { return (i32)((i64)a * b >> 32); });
      else if (t == Type::u32_) two<u32>(w, o, mask, [](u32 a, u32 b) { return (u32)((u64)a * b >> 32); });
      else if (t == Type::u64_) two<u64>(w, o, mask, [](u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); });
      else two<i64>(w, o, mask, [](i64 a, i64 b) { return (i64)((__int128)a * b >> 64); });
      return true;
    case Op::mul_wide_:
      if (t == Type::s32) two<i64, i32>(w, o, mask, [](i32 a, i32 b) { return (i64)a * b; });
      else if (t == Type::u32_) two<u64, u32>(w, o, mask, [](u32 a, u32 b) { return (u64)a * b; });
      else if (t == Type::s16) two<i32, i16>(w, o, mask, [](i16 a, i16 b) { return (i32)a * b; });
      else two<u32, u16>(w, o, mask, [](u16 a, u16 b) { return (u32)a * b; });
      return true;
    case Op::mad_lo_:
      as_integer(t, [&](auto x) {
        typedef decltype(x) T;
        three<T>(w, o, mask, [](T a, T b, T c) { return (T)(a * b + c); });
      });
      return true;
    case Op::mad_wide_:
      if (t == Type::s32) three<i64, i32, i64>(w, o, mask, [](i32 a, i32 b, i64 c) { return (i64)a * b + c; });
      else three<u64, u32, u64>(w, o, mask, [](u32 a, u32 b, u64 c) { return (u64)a * b + c; });
      return true;
    case Op::fma_:
      if (t == Type::f32) three<float>(w, o, mask, [](float a, float b, float c) { return std::fma(a, b, c); });
      else if (t == Type::f64) three<double>(w, o, mask, [](double a, double b, double c) { return std::fma(a, b, c); });
      else
        each_lane(mask, [&](int l) {
          const bool half = t == Type::f16x2;
          u32 made = 0;
          for (int i = 0; i < 32; i += 16) {
            float x[3];
            for (int j = 0; j < 3; j++) {
              const u32 from = w.get<u32>(o[1 + j], l) >> i;
              x[j] = half ? from_f16(from) : from_bf16(from);
            }
            const float y = std::fma(x[0], x[1], x[2]);
            made |= (u32)(half ? to_f16(y) : to_bf16(y)) << i;
          }
          w.set<u32>(o[0], l, made);
        });
      return true;
    case Op::div_:
      if (t == Type::f32) two<float>(w, o, mask, [](float a, float b) { return a / b; });
      else if (t == Type::f64) two<double>(w, o, mask, [](double a, double b) { return a / b; });
      else as_integer(t, [&](auto x) {
        typedef decltype(x) T;
        two<T>(w, o, mask, [](T a, T b) {
          return b == 0 ? (T)-1 : std::is_signed_v<T> && b == (T)-1 ? (T)(0 - a) : (T)(a / b);
        });
      });
      return true;
    case Op::rem_:
      as_integer(t, [&](auto x) {
        typedef decltype(x) T;
        two<T>(w, o, mask, [](T a, T b) { return b == 0 ? a : std::is_signed_v<T> && b == (T)-1 ? (T)0 : (T)(a % b); });
      });
      return true;
    case Op::min_: case Op::max_: {
      const bool most = in.code() == Op::max_;
      if (t == Type::f32)
        two<float>(w, o, mask, [&](float a, float b) { return most ? std::fmax(a, b) : std::fmin(a, b); });
      else if (t == Type::u16x2)
        two<u32>(w, o, mask, [&](u32 a, u32 b) {
          const u32 low = most ? std::max(a & 0xffff, b & 0xffff) : std::min(a & 0xffff, b & 0xffff);
          return (most ? std::max(a >> 16, b >> 16) : std::min(a >> 16, b >> 16)) << 16 | low;
        });
      else as_integer(t, [&](auto x) {
        typedef decltype(x) T;
        two<T>(w, o, mask, [&](T a, T b) { return most ? std::max(a, b) : std::min(a, b); });
      });
      return true;
    }
    case Op::abs_:
      if (t == Type::f32) one<float>(w, o, mask, [](float x) { return std::fabs(x); });
      else if (t == Type::s32) one<i32>(w, o, mask, [](i32 x) { return x < 0 ? 0 - x : x; });
      else one<i64>(w, o, mask, [](i64 x) { return x < 0 ? 0 - x : x; });
      return true;
    case Op::neg_:
      as_number(t, [&](auto x) { typedef decltype(x) T; one<T>(w, o, mask, [](T a) { return (T)(-a); }); });
      return true;
    case Op::and_: case Op::or_: case Op::xor_:
      as_integer(t, [&](auto x) {
        typedef decltype(x) T;
        if (in.code() == Op::and_) two<T>(w, o, mask, [](T a, T b) { return (T)(a & b); });
        else if (in.code() == Op::or_) two<T>(w, o, mask, [](T a, T b) { return (T)(a | b); });
        else two<T>(w, o, mask, [](T a, T b) { return (T)(a ^ b); });
      });
      return true;
    case Op::not_:
      as_integer(t, [&](auto x) { typedef decltype(x) T; one<T>(w, o, mask, [](T a) { return (T)~a; }); });
      return true;
    case Op::shl_: case Op::shr_:
      as_integer(t, [&](auto x) {
        typedef decltype(x) T;
        constexpr u32 width = sizeof(T) * 8;
        const bool left = in.code() == Op::shl_;
        each_lane(mask, [&](int l) {
          const T a = w.get<T>(o[1], l);
          const u32 by = w.get<u32>(o[2], l);
          const T full = std::is_signed_v<T> && a < 0 && !left ? (T)-1 : (T)0;
          w.set<T>(o[0], l, by >= width ? full : left ? (T)((u64)a << by) : (T)(a >> by));
        });
      });
      return true;
    case Op::clz_:
      if (is_wide(t)) one<u32, u64>(w, o, mask, [](u64 x) { return x ? (u32)__builtin_clzll(x) : 64u; });
      else one<u32>(w, o, mask, [](u32 x) { return x ? (u32)__builtin_clz(x) : 32u; });
      return true;
    case Op::popc_:
      if (is_wide(t)) one<u32, u64>(w, o, mask, [](u64 x) { return (u32)__builtin_popcountll(x); });
      else one<u32>(w, o, mask, [](u32 x) { return (u32)__builtin_popcount(x); });
      return true;
    case Op::brev_:
      one<u32>(w, o, mask, [](u32 x) {
        u32 y = 0;
        for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
        return y;
      });
      return true;
    case Op::bfi_:
      as_integer(t, [&](auto x) {
        typedef decltype(x) T;
        each_lane(mask, [&](int l) {
          const u32 at = w.get<u32>(o[3], l) & 255, count = w.get<u32>(o[4], l) & 255, width = sizeof(T) * 8;
          const u64 ones = count >= 64 ? ~0ull : (1ull << count) - 1, field = at >= width ? 0 : ones << at;
          const u64 put = at >= width ? 0 : (u64)w.get<T>(o[1], l) << at;
          w.set<T>(o[0], l, (T)((u64)w.get<T>(o[2], l) & ~field | put & field));
        });
      });
      return true;
    case Op::bfe_:
      as_integer(t, [&](auto x) {
        typedef decltype(x) T;
        each_lane(mask, [&](int l) {
          const u32 at = w.get<u32>(o[2], l) & 255, count = w.get<u32>(o[3], l) & 255, width = sizeof(T) * 8;
          const T a = w.get<T>(o[1], l);
          if (count == 0) return w.set<T>(o[0], l, 0);
          const u32 top = std::min(at + count - 1, width - 1);
          const bool sign = std::is_signed_v<T> && a >> top & 1;
          u64 made = at >= width ? 0 : (u64)(std::make_unsigned_t<T>)a >> at;
          if (count < 64) made &= (1ull << count) - 1;
          if (sign) made |= count < 64 ? ~0ull << std::min(count, top - std::min(at, top) + 1) : 0;
          w.set<T>(o[0], l, (T)made);
        });
      });
      return true;
    case Op::prmt_: three<u32>(w, o, mask, permuted); return true;
    case Op::lop3_:
      each_lane(mask, [&](int l) {
        const u32 a = w.get<u32>(o[1], l), b = w.get<u32>(o[2], l), c = w.get<u32>(o[3], l), table = w.get<u32>(o[4], l);
        u32 made = 0;
        for (int i = 0; i < 8; i++)
          if (table >> i & 1) made |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
        w.set<u32>(o[0], l, made);
      });
      return true;
    case Op::selp_: {
      const u32 which = w.predicates[o[3]];
      each_lane(mask, [&](int l) {
        const i32 from = which >> l & 1 ? o[1] : o[2];
        if (is_wide(t)) w.set<u64>(o[0], l, w.get<u64>(from, l));
        else w.set<u32>(o[0], l, w.get<u32>(from, l));
      });
      return true;
    }
    case Op::setp_: {
      u32 made = 0;
      as_number(t, [&](auto x) {
        typedef decltype(x) T;
        each_lane(mask, [&](int l) { made |= (u32)compare<T>(in.mod, w.get<T>(o[1], l), w.get<T>(o[2], l)) << l; });
      });
      if (o[0] >= 0) w.predicates[o[0]] = w.predicates[o[0]] & ~mask | made;
      return true;
    }
    case Op::cvt_: convert(w, in, o, mask); return true;
    case Op::ex2_: one<float>(w, o, mask, [](float x) { return flushed(std::exp2(flushed(x))); }); return true;
    case Op::lg2_: one<float>(w, o, mask, [](float x) { return std::log2(flushed(x)); }); return true;
    case Op::rcp_: one<float>(w, o, mask, [](float x) { return flushed(1.f / flushed(x)); }); return true;
    case Op::tanh_: one<float>(w, o, mask, [](float x) { return std::tanh(x); }); return true;
    case Op::sqrt_: one<float>(w, o, mask, [](float x) { return std::sqrt(x); }); return true;
    case Op::rsqrt_: one<float>(w, o, mask, [](float x) { return 1.f / std::sqrt(x); }); return true;
    case Op::mov_pred_: case Op::not_pred_: case Op::and_pred_: case Op::or_pred_: case Op::xor_pred_: {
      const u32 a = w.predicates[o[1]], b = in.operands > 1 ? w.predicates[o[2]] : 0;
      const u32 made = in.code() == Op::mov_pred_ ? a : in.code() == Op::not_pred_ ? ~a : in.code() == Op::and_pred_ ? a & b
                       : in.code() == Op::or_pred_ ? a | b : a ^ b;
      w.predicates[o[0]] = w.predicates[o[0]] & ~mask | made & mask;
      return true;
    }
    default: return false;
  }
}
