#!/usr/bin/env bash
# The robot's install on its architecture, emulated: Debian 12 for arm64 (Python 3.11) under qemu-user.
#
#   tests/scripts/aarch64.sh [--root DIR] [--result FILE] [--reference]
#
# Installs the extra `robot` from a wheel of the last commit, and runs there: --version, doctor, inspect of a pair and of
# a native bundle that was built here, and every test that needs neither torch nor NVRTC (tests/conftest.py skips the
# others). --reference adds torch (4.5 GB, most of it CUDA that is not used) and one short plan on the reference backend.
#
# Needs root, an active environment with '.[test]', debootstrap, and qemu-user-static with its binfmt entry (Debian:
# apt install debootstrap qemu-user-static binfmt-support). --root keeps the system for the next time, 0.4 GB.
# Ends with 0 when everything passed, 1 when something failed, 77 when it was skipped; a line says why.
set -euo pipefail
cd "$(dirname "$0")/../.."

skip() { echo "skipped: $1" && exit 77; }
root='' result='' reference=''
while (($#)); do
  case $1 in
    --root) root=$2 && shift 2 ;;
    --result) result=$2 && shift 2 ;;
    --reference) reference=yes && shift ;;
    *) echo "unknown option $1; see the top of $0" >&2 && exit 2 ;;
  esac
done
[ "$(id -u)" = 0 ] || skip "debootstrap and chroot need root"
command -v debootstrap >/dev/null || skip "debootstrap is missing: apt install debootstrap"
entry=/proc/sys/fs/binfmt_misc/qemu-aarch64
[ -e "$entry" ] || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc 2>/dev/null || true
[ "$(uname -m)" = aarch64 ] || grep -qs '^flags:.*F' "$entry" ||
  skip "no binfmt entry runs aarch64 here: apt install qemu-user-static binfmt-support; update-binfmts --enable qemu-aarch64"
python3 -c 'import edge_dflash, pytest' 2>/dev/null || skip "python3 is not of an environment with '.[test]'"

commit=$(git describe --always --dirty)
work=$(mktemp -d)
root=${root:-$work/root}
leave() {
  for place in proc sys dev/shm; do mountpoint -q "$root/$place" && umount "$root/$place"; done
  rm -rf "$work"
}
trap leave EXIT
inside() { # as an Orin's processor: what qemu calls `max` has instructions that no board has
  chroot "$root" /usr/bin/env -i QEMU_CPU=cortex-a76 PATH=/robot/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 "$@"
}
failures=0
step() { # a name, then a command: what it says, its exit code and seconds are kept
  local name=$1 began=$SECONDS code=0
  shift
  echo "== $name: $*"
  "$@" >"$work/$name.out" 2>&1 || code=$?
  tail -n 25 "$work/$name.out"
  [ $code = 0 ] || failures=$((failures + 1))
  printf '%s\t%s\t%s\n' "$name" "$code" $((SECONDS - began)) >>"$work/steps.tsv"
}
platforms=(--only-binary :all: --python-version 3.11 --platform manylinux2014_aarch64)
for glibc in $(seq 17 36); do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done

# The system, with the files of a board's kernel that qemu-user does not show: which processor this is.
[ -e "$root/usr/bin/python3" ] ||
  debootstrap --arch=arm64 --variant=minbase --include=git,python3-venv bookworm "$root" http://deb.debian.org/debian >"$work/debootstrap" ||
  { tail -n 3 "$work/debootstrap" && skip "debootstrap could not fetch Debian 12 for arm64"; }
mkdir -p "$root/dev/shm"
mount -t proc proc "$root/proc" && mount -t tmpfs tmpfs "$root/sys" && mount -t tmpfs tmpfs "$root/dev/shm"
mkdir -p "$root"/sys/devices/system/cpu/cpu{0,1}/regs/identification
echo 0-1 | tee "$root"/sys/devices/system/cpu/{possible,present,online} >/dev/null
for cpu in 0 1; do echo 0x00000000410fd420 >"$root/sys/devices/system/cpu/cpu$cpu/regs/identification/midr_el1"; done

# The wheels, for this commit; the downloads and the builds need no emulation.
rm -rf "$root"/{robot,wheels,checkout,tools,bundles,tests.xml}
mkdir -p "$root"/{wheels,checkout,bundles}
git archive HEAD | tar -x -C "$root/checkout"
python3 -m pip wheel -q --no-deps -w "$root/wheels" "$root/checkout"
python3 -m pip download -q "${platforms[@]}" --find-links "$root/wheels" -d "$root/wheels" 'edge-dflash[robot]'
rm -rf "$root/checkout/build" "$root"/checkout/*.egg-info
tools=$(python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test"][1:])')
# shellcheck disable=SC2086
python3 -m pip install -q "${platforms[@]}" --no-compile --target "$root/tools" $tools 'httpx2>=2,<3'
models=edge_dflash/demo/models
pair=(--target $models/target --drafter $models/drafter)
step build-sm110 python3 -m edge_dflash build "${pair[@]}" --backend native --arch sm110a --recipe demo-cpu --output "$root/bundles/sm110"
step build-cpu python3 -m edge_dflash build "${pair[@]}" --arch cpu --recipe demo-cpu --output "$root/bundles/cpu"

# The robot.
inside python3 -m venv /robot
step install inside pip install --no-index --find-links /wheels 'edge-dflash[robot]'
step packages inside pip list --format json
step check inside pip check
du -sm "$root/robot" >"$work/sizes" # on its own line: du counts no file twice
du -sm "$root"/robot/lib/python3.11/site-packages/* >>"$work/sizes"
step version inside edge-dflash --version
step inspect inside edge-dflash inspect --target /checkout/$models/target --drafter /checkout/$models/drafter --board agx-thor
step inspect-sm110 inside edge-dflash inspect /bundles/sm110 --board agx-thor
step doctor inside edge-dflash doctor
if [ $reference ]; then
  [ -e "$root/torch" ] || python3 -m pip install -q "${platforms[@]}" --no-compile --target "$root/torch" torch==2.13.0
  step plan inside PYTHONPATH=/torch edge-dflash generate /bundles/cpu --prompt 'Close the fridge.' --max-new-tokens 12 --json
fi
step tests inside PYTHONPATH=/tools PYTHONDONTWRITEBYTECODE=1 sh -c \
  'cd /checkout && python -m pytest -q -p no:cacheprovider --junitxml /tests.xml'

python3 tests/scripts/aarch64_result.py "$work" "$root" "$commit" ${result:+"$result"}
[ $failures = 0 ] || { echo "$failures steps failed" && exit 1; }
