// The storage types of CPU kernels. They carry bits only: arithmetic is always fp32.
//
// Conversions to 16 bits round to nearest even and keep subnormal numbers, as torch does.
#pragma once

#include <cstdint>
#include <cstring>

namespace mindspeed {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

inline uint32_t bits_of(float v) {
  uint32_t u;
  std::memcpy(&u, &v, sizeof u);
  return u;
}
inline float float_of(uint32_t u) {
  float v;
  std::memcpy(&v, &u, sizeof v);
  return v;
}

inline float decode(float v) { return v; }
inline float decode(Bf16 v) { return float_of(static_cast<uint32_t>(v.bits) << 16); }
inline float decode(Fp16 v) {
  const uint32_t sign = (v.bits & 0x8000u) << 16, payload = (v.bits & 0x7fffu) << 13;
  if (payload >= 0x0f800000u) return float_of((payload + 0x70000000u) | sign);  // infinity, NaN
  // Re-biased with the exponent of the smallest normal number; subtracting that number makes subnormal ones exact.
  if (payload < 0x00800000u) return float_of(bits_of(float_of(payload + 0x38800000u) - float_of(0x38800000u)) | sign);
  return float_of((payload + 0x38000000u) | sign);
}

inline void encode(float v, float* out) { *out = v; }
inline void encode(float v, Bf16* out) {
  const uint32_t u = bits_of(v);
  out->bits = v == v ? static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16) : 0x7fc0u;
}
inline void encode(float v, Fp16* out) {
  const uint32_t u = bits_of(v), magnitude = u & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u)
    result = 0x7e00u;
  else if (magnitude >= 0x47800000u)
    result = 0x7c00u;
  else if (magnitude < 0x38800000u)
    // 0.5f has the ulp of the smallest subnormal fp16 number, so the addition rounds at the right bit.
    result = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  else
    result = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  out->bits = static_cast<uint16_t>(result | ((u >> 16) & 0x8000u));
}

}  // namespace mindspeed
