#!/usr/bin/env bash
# Liger 0.8.5's own tests, unchanged, against Tigon's liger_kernel interface. See docs/liger-suite.md.
#   tools/liger_suite.sh [pytest arguments]          e.g. tools/liger_suite.sh test/transformers/test_rope.py -k partial
# Environment: PYTHON (.venv's, else python3), JOBS (workers, with pytest-xdist), MAX_ELEMENTS (tests of larger tensors are
# left out; 2^22 without a GPU), ARGS (more pytest arguments), LIGER_SUITE_JSON (file of outcomes by test).
# The tests are fetched once from PyPI into build/liger_suite; a machine without network needs that folder and nothing else.
# Exits non-zero when a test fails that tests/liger_suite/expected.json does not list, or when a listed one passes.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
suite=$root/build/liger_suite
version=0.8.5
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=python3

if [[ ! -e $suite/$version ]]; then
  rm -rf "$suite" && mkdir -p "$suite"
  python3 -m pip download -q --no-deps --no-binary=liger-kernel -d "$suite" "liger-kernel==$version"
  tar xzf "$suite/liger_kernel-$version.tar.gz" -C "$suite"
  unpacked=$suite/liger_kernel-$version
  mv "$unpacked/test" "$unpacked/LICENSE" "$unpacked/NOTICE" "$suite/"
  # Two tests run Liger's files of these paths; the first is the interface's module here.
  mkdir -p "$suite/src/liger_kernel/ops/cute"
  mv "$unpacked"/src/liger_kernel/ops/cute/fused_linear_scaled_cross_entropy_tp.py "$suite/src/liger_kernel/ops/cute/"
  echo 'from liger_kernel.ops.fused_linear_scaled_cross_entropy import *  # noqa: F403' \
    > "$suite/src/liger_kernel/ops/fused_linear_scaled_cross_entropy.py"
  rm -rf "$unpacked" "$suite/liger_kernel-$version.tar.gz" "$suite"/test/{cute,cutedsl,cutile,backends,ops}
  printf '[pytest]\npython_files = test_*.py\n' > "$suite/pytest.ini"
  touch "$suite/$version"
fi

export PYTHONPATH=$suite:$root/tests/liger_suite:$root/compat/liger_kernel:$root/python${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUBLAS_WORKSPACE_CONFIG=:4096:8
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
device=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
[[ $device == cuda ]] || export MAX_ELEMENTS=${MAX_ELEMENTS:-4194304}
cd "$suite"

paths=()
[[ " $* ${ARGS:-} " == *" test/"* ]] || {
  paths=(test/transformers test/triton test/chunked_loss test/megatron)
  [[ $device == cpu ]] || paths+=(test/convergence/fp32 test/convergence/bf16)
}
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n "${JOBS:-$(($(nproc) < 12 ? $(nproc) : 12))}" --maxschedchunk 4)
# shellcheck disable=SC2086
exec "$python" -m pytest -c pytest.ini --rootdir . -p liger_suite_plugin -p no:cacheprovider -q --tb=line --no-header \
  --disable-warnings --continue-on-collection-errors "${workers[@]}" "${paths[@]}" ${ARGS:-} "$@"
