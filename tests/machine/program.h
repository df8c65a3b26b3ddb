// A kernel in numbers, as registers.py writes it.
#pragma once
#include "numbers.h"

#define EACH_OP(X)                                                                                                     \
  X(mov) X(pack) X(unpack) X(add) X(sub) X(mul) X(mul_lo) X(mul_hi) X(mul_wide) X(mad_lo) X(mad_hi) X(mad_wide) X(fma)  \
  X(div) X(rem) X(min) X(max) X(abs) X(neg) X(and) X(or) X(xor) X(not) X(shl) X(shr) X(clz) X(popc) X(brev) X(bfi)      \
  X(bfe) X(prmt) X(lop3) X(selp) X(setp) X(cvt) X(ex2) X(lg2) X(rcp) X(tanh) X(sqrt) X(rsqrt) X(and_pred) X(or_pred)    \
  X(xor_pred) X(not_pred) X(mov_pred) X(ld) X(st) X(atom) X(red) X(shfl) X(vote) X(bar_sync) X(bar_arrive) X(bar_red)   \
  X(bar_warp) X(cluster_arrive) X(cluster_wait) X(bra) X(ret) X(nop) X(mapa) X(mbarrier_init) X(mbarrier_arrive)        \
  X(mbarrier_expect) X(mbarrier_wait) X(fence_async) X(ldmatrix) X(stmatrix) X(movmatrix) X(mma) X(wgmma)               \
  X(wgmma_commit) X(wgmma_wait) X(tma_load) X(tma_store) X(bulk_load) X(bulk_reduce) X(bulk_commit) X(bulk_wait)    \
  X(copy) X(copy_arrive)

enum class Op {
#define X(name) name##_,
  EACH_OP(X)
#undef X
};

// In the order of ptx.py's TYPES.
enum class Type {
  none, pred, b8, u8_, s8, b16, u16_, s16, f16, bf16, b32, u32_, s32, f32, b64, u64_, s64, f64, f16x2, bf16x2, u16x2, e4m3,
  e4m3x2,
};
inline bool is_wide(Type t) { return t >= Type::b64 && t <= Type::f64; }
inline int size_of(Type t) {
  if (t <= Type::pred) return 0;
  if (t <= Type::s8 || t == Type::e4m3) return 1;
  if (t <= Type::bf16 || t == Type::e4m3x2) return 2;
  return is_wide(t) ? 8 : 4;
}

struct Instruction {
  i32 op, type, type2, mod, guard, results, operands, at, target;
  Op code() const { return (Op)op; }
  Type kind() const { return (Type)type; }
};

struct Constant { i32 word; u32 bits; };
struct Symbol { i32 kind, word; i64 offset; };  // kind: 0 shared, 1 parameter, 2 local
struct Special { i32 kind, word; };

struct Program {
  const Instruction* code;
  const i32* operands;
  const Constant* constants;
  const Symbol* symbols;
  const Special* specials;
  i32 constant_count, symbol_count, special_count, words, predicates, local_bytes;
  i32 shared_bytes;  // static
};

constexpr u64 SHARED_WINDOW = 1ull << 62, LOCAL_WINDOW = 1ull << 61;  // of generic addresses
constexpr u32 RANK_STEP = 1u << 24;  // an address in shared::cluster has the block's rank, plus one, above its offset
