#!/usr/bin/env bash
# Makes .venv, installs pinned dependencies, builds. Usage: tools/bootstrap.sh train|cpp|dev|docs|wheel
#   train: what examples/train.py needs      dev: that, and the tests, their tools and the C++ tests
#   docs: build/docs-venv, for the site
#   wheel: dist/*.whl, of Tigon and tigon-liger-compat; TIGON_CUDA=OFF: dist/cpu/*.whl
#   cpp: the C++ library, installed in build/prefix, and examples/cpp built with it in build/example
# Quick when nothing changed: every step leaves a stamp that names what it was made from.
# Environment: PYTHON (interpreter), JOBS (parallel compilers), TIGON_WERROR=ON|OFF (warnings are errors),
#   TIGON_CUDA=ON|OFF (unset: whether there is an NVIDIA GPU), TIGON_CUDA_ARCHS (e.g. 80-real; unset: what that GPU is;
#   a wheel: ON, and release_archs)
set -euo pipefail

mode=${1:?usage: tools/bootstrap.sh train|cpp|dev|docs|wheel}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
PATH=${PATH//"$root/.venv/bin:"/}  # an activated .venv is not the user's Python
unset VIRTUAL_ENV PYTHONHOME
readonly torch_pin=torch==2.13.0
# sm_80's code runs on 8.6 and 8.9, sm_100's on 10.3; PTX of compute_100 serves what has no code of its own: 11.0, and later.
readonly release_archs='80-real;90a-real;100-real;100-virtual;120-real' manylinux=manylinux_2_34_x86_64

say() { printf '[tigon] %s\n' "$*"; }
fail() { printf '[tigon] %s\n' "$*" >&2; exit 1; }

# --- System tools: through apt when root, else one line says what is missing. -------------------------------------------
need() {  # need PACKAGE TEST...: remembers the package when the test fails
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}

system_tools() {
  local missing=()
  need "$([[ ${CXX:-} == g++-* ]] && echo "$CXX" || echo g++)" sh -c 'command -v "${CXX:-c++}"'
  find_python || missing+=(python3)
  local versioned
  versioned=$("${python:-python3}" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])' 2>/dev/null) || versioned=python3-venv
  need "$versioned" "${python:-python3}" -c 'import ensurepip, venv'
  if [[ $mode == dev ]]; then
    # doctest: one header, no library, in Debian and Ubuntu as doctest-dev; PyPI has no maintained package of it or Catch2.
    need doctest-dev sh -c 'echo "#include <doctest/doctest.h>" | "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ -'
    need make sh -c 'command -v make'
  fi
  if [[ $mode == cpp || $mode == dev ]]; then  # examples/cpp reads and writes JSON: one header library of Debian and Ubuntu
    need nlohmann-json3-dev sh -c 'echo "#include <nlohmann/json.hpp>" | "${CXX:-c++}" -std=c++20 -E -x c++ - >/dev/null'
  fi
  [[ ${#missing[@]} == 0 ]] && return
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "installing system packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    local output
    output=$(apt-get update -qq 2>&1 && apt-get install -y -qq --no-install-recommends "${missing[@]}" 2>&1 </dev/null) ||
      fail "apt-get could not install ${missing[*]}: $output"
    find_python || fail "Python >= 3.10 is needed; set PYTHON=/path/to/python3"
  else
    fail "missing: ${missing[*]}. Install with: sudo apt-get install ${missing[*]}"
  fi
}

find_python() {
  for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && return
  done
  python=
  [[ -z ${PYTHON:-} ]] || fail "PYTHON=$PYTHON must be Python >= 3.10"
  return 1
}

# --- Python packages. ---------------------------------------------------------------------------------------------------
# done_with STAMP KEY: true when the step was last done with the same key
done_with() { [[ -f .venv/$1 && $(<".venv/$1") == "$2" ]]; }

# Where the user's own torch >= 2.10 is installed, or nothing.
users_torch() {
  local directory
  directory=$("$python" cmake/find_torch.py 2>/dev/null) && dirname "$directory"
}

pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input -qq "$@" </dev/null; }

virtual_environment() {
  local key torch_home packages
  key=$("$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')
  done_with .stamp-python "$key" && return
  torch_home=$(users_torch) || true
  rm -rf .venv
  if [[ -n $torch_home ]]; then
    say "making .venv ($key), with the torch of that Python"
    "$python" -m venv --system-site-packages .venv
  else
    say "making .venv ($key)"
    "$python" -m venv .venv
  fi
  packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # A torch inside another virtual environment is not among the system's packages: its directory is named to Python.
  if [[ -n $torch_home ]] && ! .venv/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
    echo "$torch_home" >"$packages/users_torch.pth"
  fi
  echo "$root/python" >"$packages/tigon_development.pth"
  if [[ -z $torch_home ]]; then
    say "installing $torch_pin (a large download the first time)"
    pip install "$torch_pin"
  fi
  echo "$key" >.venv/.stamp-python
}

python_packages() {
  local files=(requirements.txt) key
  [[ $mode == dev ]] && files+=(requirements-dev.txt)
  key=$(cat "${files[@]}" .venv/.stamp-python | sha256sum)
  done_with .stamp-dev "$key" || done_with ".stamp-$mode" "$key" && return
  say "installing the packages of ${files[*]: -1}"
  # The programs first, into .venv/bin even where the user's Python has the same versions elsewhere.
  local programs
  mapfile -t programs < <(grep -hE '^(cmake|ninja|ruff|clang-format)==' "${files[@]}")
  pip install --ignore-installed --no-deps "${programs[@]}"
  pip install -r "${files[*]: -1}"
  echo "$key" >".venv/.stamp-$mode"
}

# The site's packages, apart from .venv: `make docs` needs neither PyTorch nor the library.
docs_environment() {
  "$python" -m venv --clear build/docs-venv
  build/docs-venv/bin/python -m pip --disable-pip-version-check --no-input -qq install -r requirements-docs.txt </dev/null
  touch build/docs-venv/.stamp
}

# --- The native library. ------------------------------------------------------------------------------------------------
# Sets cuda, archs and why.
cuda_options() {
  read -r cuda archs why < <(.venv/bin/cmake -P cmake/find_gpu.cmake)
}

build() {
  local cuda archs why
  cuda_options
  local options=(-DCMAKE_MAKE_PROGRAM="$root/.venv/bin/ninja" -DPython_EXECUTABLE="$root/.venv/bin/python"
    -DTIGON_WERROR="${TIGON_WERROR:-OFF}" -DTIGON_CUDA="$cuda" -DTIGON_CUDA_ARCHS="$archs") targets=(tigon_torch)
  local key="${options[*]} $(<.venv/.stamp-python)" log=build/configure.log
  if [[ $mode == dev ]]; then
    options+=(-DTIGON_TESTS=ON) targets=(all) key+=" with tests"  # a build with tests serves `make train` too
  fi
  [[ $mode != cpp ]] || targets=(tigon)
  # A build made for another Python or with other options is configured again; objects are kept where they still fit.
  if [[ ! -f build/build.ninja || ! -f build/.stamp || $(<build/.stamp) != "$key"* ]]; then
    mkdir -p build
    rm -f build/CMakeCache.txt build/.stamp
    .venv/bin/cmake -G Ninja -S . -B build "${options[@]}" >"$log" 2>&1 || { cat "$log" >&2; fail "configuring failed"; }
    echo "$key" >build/.stamp
    if [[ -n $why ]]; then say "$why"; else sed -n 's/^-- Tigon: /[tigon] building for /p' "$log"; fi
  fi
  (cd build && NINJA_STATUS='[%f/%t] ' "$root/.venv/bin/ninja" -j "${JOBS:-$(nproc)}" "${targets[@]}")
  [[ $mode != cpp ]] || cpp_examples
}

cpp_examples() {
  local log=build/example.log
  .venv/bin/cmake --install build --component cpp --prefix build/prefix >"$log"
  .venv/bin/cmake -G Ninja -S examples/cpp -B build/example -DCMAKE_PREFIX_PATH="$root/build/prefix" \
    -DCMAKE_MAKE_PROGRAM="$root/.venv/bin/ninja" >>"$log" 2>&1 || { cat "$log" >&2; fail "configuring examples/cpp failed"; }
  (cd build/example && NINJA_STATUS='[%f/%t] ' "$root/.venv/bin/ninja")
}

# --- Wheels for others. -------------------------------------------------------------------------------------------------
# Built as pip builds, in an isolated environment; the libraries of PyTorch and CUDA stay the user's own.
wheels() {
  local folder=dist made=build/made
  export TIGON_CUDA=${TIGON_CUDA:-ON} TIGON_CUDA_ARCHS=${TIGON_CUDA_ARCHS:-$release_archs}
  export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)}
  [[ $TIGON_CUDA != OFF ]] || folder=dist/cpu
  pip install -r requirements-wheel.txt
  rm -rf "$made" "$folder"/*.whl
  say "building the wheels of $folder"
  pip wheel --no-deps -w "$made" --config-settings build-dir="build/wheel${folder#dist}" .
  pip wheel --no-deps -w "$folder" ./compat/liger_kernel
  PATH=$root/.venv/bin:$PATH .venv/bin/auditwheel repair --plat $manylinux --exclude 'libtorch*' --exclude 'libc10*' \
    -w "$folder" "$made"/tigon-*.whl
  ls -sh "$folder"/*.whl
}

[[ ${BASH_SOURCE[0]} == "$0" ]] || return 0  # read by tests/test_build.py
system_tools
if [[ $mode == docs ]]; then
  docs_environment
  exit
fi
virtual_environment
if [[ $mode == wheel ]]; then
  wheels
  exit
fi
python_packages
build
