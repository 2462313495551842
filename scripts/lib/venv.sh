# shellcheck shell=bash
# The virtual environment, with the package in it as an editable install.
# Needs say.sh, and PROJECT, the project's directory.

VENV=$PROJECT/.venv

# install_python_package [EXTRA]: the project and its dependencies, into .venv.
install_python_package() {
    local extra=${1:-}
    if [ -e "$VENV" ] && [ ! -w "$VENV" ]; then
        die "$VENV belongs to $(stat -c %U "$VENV"), not to you: set up as that user, or" \
            "use a clone of your own"
    fi
    make_venv
    local stamp=$VENV/btrfs-ublk-installed${extra:+-$extra} state
    state=$(build_state)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$state" ]; then
        rm -f "$VENV"/btrfs-ublk-installed*
        read_build_requirements
        PATH=$VENV/bin:$PATH run_logged "building the package${extra:+ with [$extra]}" \
            "$VENV/bin/python" -m pip install --disable-pip-version-check \
            --no-build-isolation --editable "$PROJECT${extra:+[$extra]}" ||
            die "the package was not built; see above (no network?)"
        leave_out_import_hook
        # Any extra includes the package itself, and the developers' all others.
        echo "$state" | tee "$stamp" >"$VENV/btrfs-ublk-installed"
        if [ "$extra" = dev ]; then
            cp "$stamp" "$VENV/btrfs-ublk-installed-report"
        fi
    fi
    rebuild_helpers
}

# Each Python would load meson-python's hook and run ninja at its start, which takes three
# times as long as the start itself. A path does for programs and type checkers.
leave_out_import_hook() {
    local packages
    packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -f "$packages/btrfs_ublk" # a link of earlier versions
    echo "$PROJECT" >"$packages/btrfs-ublk-editable.pth"
}

rebuild_helpers() {
    local dir log
    for dir in "$PROJECT"/build/cp3*; do
        if [ -f "$dir/build.ninja" ] && [ -x "$VENV/bin/ninja" ]; then
            log=$("$VENV/bin/ninja" -C "$dir" 2>&1) || {
                printf '%s\n' "$log" >&2
                die "the C helpers do not compile; see above"
            }
        fi
    done
}

make_venv() {
    local python
    if "$VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' \
        2>/dev/null; then
        return
    fi
    python=$(find_python) || die "Python 3.11 or newer is needed;" \
        "Debian 12 has it as python3, Fedora as python3"
    rm -rf "$VENV"
    run_logged "creating .venv with $("$python" --version)" \
        "$python" -m venv "$VENV" || die "the virtual environment was not created"
}

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

read_build_requirements() {
    local requirements
    mapfile -t requirements < <("$VENV/bin/python" - "$PROJECT/pyproject.toml" <<'END'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")
END
    )
    run_logged "installing the build tools" \
        "$VENV/bin/python" -m pip install --disable-pip-version-check \
        "${requirements[@]}" ||
        die "the build tools could not be fetched (no network?); needed:" \
            $'\n   ' ".venv/bin/python -m pip install ${requirements[*]}"
}

# Changes when the package must be installed anew: its description, the set of
# build files (ninja itself sees to what is in the sources), or its place.
build_state() {
    {
        echo "$PROJECT"
        cat "$PROJECT/pyproject.toml" "$PROJECT/scripts/lib/venv.sh"
        find "$PROJECT" -path "$PROJECT/build*" -prune -o -path "$VENV" -prune -o \
            \( -name meson.build -o -name 'meson*options*' \) -print0 |
            LC_ALL=C sort -z | xargs -0 cat
    } | sha256sum | cut -d' ' -f1
}
