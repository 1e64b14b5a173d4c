#include "tigon/ops/dequantize/dequantize.h"

#include "tigon/base/op.h"

namespace tigon {

TIGON_DEFINE_ENTRY(dequantize, Dequantize, "dequantize", "dequantize", none)

}  // namespace tigon
