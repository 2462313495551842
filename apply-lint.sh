#!/usr/bin/env bash
# Format and check Python, C and shell.  --check changes nothing and fails if anything
# would be changed.  --no-analyzer leaves out clang's, which takes minutes for sources
# that it has not seen.  Every check runs, also after a failure; the end lists those.
set -euo pipefail
PROJECT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$PROJECT"
# shellcheck source=scripts/lib/say.sh
. scripts/lib/say.sh

check=no tidy=()
for option; do
    case $option in
    --check) check=yes ;;
    --no-analyzer) tidy=("$option") ;;
    *)
        echo "usage: apply-lint.sh [--check] [--no-analyzer]" >&2
        exit 2
        ;;
    esac
done

scripts/setup --test
bin=$PROJECT/.venv/bin
build=$PROJECT/build/sanitized
export PATH=$bin:$PATH # meson looks for ninja there

files() { # find's tests…: the project's own files
    find . -type d \( -name .git -o -name .venv -o -name 'build*' -o -name dist -o \
        -name '.mesonpy-*' \) -prune -o \
        -type f "$@" -print | LC_ALL=C sort
}
scripts_of() { # INTERPRETER: executable files without a suffix that it runs
    files -perm /111 ! -name '*.*' | while read -r file; do
        case $(head -n 1 "$file") in
        '#!'*"$1"*) echo "$file" ;;
        esac
    done
}
mapfile -t python < <(files -name '*.py' && scripts_of python3)
mapfile -t python_scripts < <(scripts_of python3)
mapfile -t c_files < <(files \( -name '*.c' -o -name '*.h' \) -path './csrc/*')
mapfile -t shell < <(files -name '*.sh' && scripts_of 'bash' && scripts_of '/bin/sh' &&
    files -path './.ci/*')

failed=()
step() { # NAME command…
    local name=$1 start=$SECONDS
    shift
    say "$name"
    if ! "$@" >&2; then
        failed+=("$name")
    fi
    if ((SECONDS - start > 5)); then
        say "$name took $((SECONDS - start)) s"
    fi
}

check_types() {
    "$bin/mypy" --no-error-summary || return
    # Standard library only, so neither the package nor its settings are needed.
    MYPYPATH=scripts/lib "$bin/mypy" --no-error-summary --strict --scripts-are-modules \
        --explicit-package-bases scripts/lib/vmlib scripts/lib/{bounded,testrun,tidy}.py scripts/*.py \
        "${python_scripts[@]}"
}

check_format() { # with --diff, black looks at what it knows to be well as well
    "$bin/black" --quiet --check "${python[@]}" ||
        { "$bin/black" --quiet --diff "${python[@]}" && false; }
}

compile() { # all warnings are errors; also makes what clang-tidy reads
    PYTHONPATH=$PROJECT/tests "$bin/python" -m support.sanitized_build
}

if [ "$check" = yes ]; then
    step "black" check_format
    step "isort" "$bin/isort" --quiet --check --diff "${python[@]}"
    step "clang-format" clang-format --dry-run --Werror "${c_files[@]}"
else
    step "isort" "$bin/isort" --quiet "${python[@]}"
    step "black" "$bin/black" --quiet "${python[@]}"
    step "clang-format" clang-format -i "${c_files[@]}"
fi
step "flake8" "$bin/flake8" "${python[@]}"
step "mypy" check_types
step "shellcheck" shellcheck "${shell[@]}"
step "C warnings" compile
step "clang-tidy" "$bin/python" scripts/lib/tidy.py "${tidy[@]}" "$build"

if ((${#failed[@]})); then
    printf -v list ', %s' "${failed[@]}"
    die "failed: ${list#, }"
fi
say "all clean"
