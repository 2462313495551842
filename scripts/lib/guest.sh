# shellcheck shell=bash
# What a guest of scripts/vm calls the host's files.  Needs PROJECT.

# files_for_guest OPTION command…: set guest_command to the command, with the file that
# follows each OPTION named as in the guest, also if it was relative.
files_for_guest() {
    local option=$1 word is_file=no
    shift
    guest_command=()
    for word in "$@"; do
        if [ "$is_file" = yes ]; then
            word=$(guest_path "$word")
        fi
        is_file=no
        case $word in
        "$option") is_file=yes ;;
        "$option="*) word=$option=$(guest_path "${word#*=}") ;;
        esac
        guest_command+=("$word")
    done
}

guest_path() {
    local path
    # What does not exist is left to the command to complain about.
    path=$(realpath --canonicalize-existing -- "$1" 2>/dev/null) || path=$1
    case $path in
    "$PROJECT"/*) ;;
    # The guest has its own.
    /tmp/* | /run/* | /dev/shm/*) path=/run/host$path ;;
    esac
    printf '%s\n' "$path"
}
