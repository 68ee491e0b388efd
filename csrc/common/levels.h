// Levels of instruction sets, picked at run time.
#pragma once

#if defined(__x86_64__)
#define MS_X86 1
#define MS_AVX2 "avx2,f16c"
#define MS_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"
#define MS_AVX512_BF16 "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c"
// The function `name` of the namespace of `level`; the arguments of a template go in `name`.
#define MS_LEVEL_CALL(level, name)                                \
  ((level) == ::mindspeed::kAvx512Bf16 ? &avx512_bf16::name       \
   : (level) == ::mindspeed::kAvx512   ? &avx512::name            \
   : (level) == ::mindspeed::kAvx2     ? &avx2::name              \
                                       : &portable::name)
#else
#define MS_LEVEL_CALL(level, name) (static_cast<void>(level), &portable::name)
#endif

namespace mindspeed {

enum Level : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// The best level of this processor.
inline int best_level() {
#ifdef MS_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return __builtin_cpu_supports("avx512bf16") ? kAvx512Bf16 : kAvx512;
  if (avx2) return kAvx2;
#endif
  return kPortable;
}

}  // namespace mindspeed
