#include "tigon/ops/loss_head/engine.h"

namespace tigon::cpu {

void loss_head_pairs(Context&, const LossHeadPairs& a) {
  const int64_t* target = a.target.as<int64_t>();
  int64_t *index = a.index.as<int64_t>(), *labels = a.labels.as<int64_t>(),
          *position = a.position.as<int64_t>();
  int64_t place = 0;
  for (int64_t pair = 0; pair < a.pairs; ++pair)
    for (int64_t answer = pair; answer < 2 * a.pairs; answer += a.pairs)
      for (int64_t row = answer * a.tokens; row < (answer + 1) * a.tokens; ++row) {
        bool taken = !a.compact || target[row] != a.ignore_index;
        position[row] = taken ? place : -1;
        if (taken) index[place] = row, labels[place++] = target[row];
      }
}

}  // namespace tigon::cpu
