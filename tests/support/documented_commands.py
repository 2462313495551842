"""Who executes the commands that documents tell of.

To document a command that is executed nowhere yet, do one of these:

- write it in a block of ``console``, with what it prints, in a document of REPLAYED;
- add a line with the same command and (at least) the same options to SCENARIOS, where
  it fits: the lines of a scenario are run by bash, one after the other, in an empty
  directory, on this kernel;
- where it takes too long, or needs what this machine has not: name in ELSEWHERE the
  test that executes it, as "tests/test_x.py::test_name", or a script that does.
"""

from __future__ import annotations

from dataclasses import dataclass

from btrfs_ublk.base.capabilities import (
    BTRFS,
    FUSE,
    LOOP,
    MOUNT,
    REPORT_PACKAGES,
    ROOT,
    Capability,
    Helper,
)
from btrfs_ublk.base.helpers import CHECKSEED, MKSEED, SERVER

_FAILING = "1: "


@dataclass(frozen=True)
class Scenario:
    """``lines`` end with status 0; those after "1: " with status 1. A backslash at the
    end of one has it go on in the next.
    """

    needs: tuple[Capability, ...]
    text: str

    @property
    def commands(self) -> list[tuple[int, str]]:
        """Exit status and line of each."""
        lines = self.text.strip().replace("\\\n", " ").splitlines()
        return [
            (1, line[len(_FAILING) :]) if line.startswith(_FAILING) else (0, line)
            for line in lines
        ]


#: Documents whose blocks of ``console`` are run, and by which test.
REPLAYED = {
    "README.md": "tests/docs/test_quick_start.py::test_the_readme_has_the_same",
    "docs/quick-start.md": "tests/docs/test_quick_start.py::test_a_fresh_clone",
    "docs/how-to/*.md": "tests/docs/test_transcripts.py::test_it_does_what_it_says",
}

SCENARIOS = {
    "seeds": Scenario(
        (Helper(MKSEED), Helper(CHECKSEED)),
        r"""
btrfs-ublk --version
btrfs-ublk seed create --virtual-data-size 4E --metadata-only seed.img
btrfs-ublk seed inspect seed.img
btrfs-ublk seed check seed.img
head -c 1M /dev/urandom > image.raw
btrfs-ublk map digest image.raw --unit 64K -o image.digests
gzip -k image.raw
btrfs-ublk map index image.raw.gz --codec gzip --spacing 1M -o image.index
btrfs-ublk map digest image.raw.gz --index image.index --unit 1M -o image.digests
""",
    ),
    "this machine": Scenario(
        (Helper(SERVER),),
        r"""
btrfs-ublk doctor || [ $? = 3 ]
btrfs-ublk features
btrfs-ublk bugreport -o report.tar.gz
btrfs-ublk gc
btrfs-ublk device list
btrfs-ublk device gc
btrfs-ublk volume list
btrfs-ublk metrics
btrfs-ublk top --count 1
eval "$(btrfs-ublk completion bash)"
btrfs-ublk completion zsh > zsh
btrfs-ublk completion fish > fish
btrfs-ublk site-cache config --nodes 10.0.0.1,10.0.0.2 --unit 256K \
    --origin https://registry.example.org --max-size 200G \
    --certificate /etc/ssl/c.pem --key /etc/ssl/c.key -o c.conf
""",
    ),
    "cache": Scenario(
        (Helper(SERVER),),
        r"""
btrfs-ublk cache limit -d cache --max 50G --reserve 1M
btrfs-ublk cache status -d cache
btrfs-ublk cache verify -d cache
btrfs-ublk cache prune -d cache --to 20G --older-than 30d
btrfs-ublk cache pin -d cache $(printf '%064d' 1)
btrfs-ublk cache unpin -d cache $(printf '%064d' 1)
""",
    ),
    "devices": Scenario(
        (ROOT, LOOP, FUSE, Helper(MKSEED), Helper(SERVER)),
        r"""
head -c 1M /dev/urandom > image.raw
btrfs-ublk map digest image.raw --unit 64K -o image.digests
btrfs-ublk seed create seed.img --virtual-data-size 1T --metadata-only \
    --description lazy.json --map my.map --cache my-cache
btrfs-ublk device up NAME lazy.json --front-end fuse
btrfs-ublk map add NAME --file image.raw --unit 64K --digests image.digests
btrfs-ublk map add NAME --url http://127.0.0.1:9/image --size 1M --unit 64K \
    --digests image.digests --offset 1G
gzip -k image.raw
btrfs-ublk map index image.raw.gz --codec gzip -o image.index
btrfs-ublk map digest image.raw.gz --index image.index --unit 1M -o gz.digests
btrfs-ublk map add NAME --url http://127.0.0.1:9/image.gz --unit 1M \
    --codec gzip --index image.index --digests gz.digests --offset 2G
echo '{"kind": "pattern", "size": 1048576}' > mappings.jsonl
echo '[null, 1048576, 0, 0]' >> mappings.jsonl
btrfs-ublk map add NAME --bulk mappings.jsonl
btrfs-ublk map list NAME
btrfs-ublk map show NAME 1G
btrfs-ublk map verify NAME
btrfs-ublk map drain NAME --end 1G
btrfs-ublk map stats NAME
btrfs-ublk trace record NAME -o boot.trace --until-idle 0.5
btrfs-ublk prefetch NAME --trace boot.trace --rate 20M
btrfs-ublk prefetch NAME --offset 0 --length 1M --no-wait
btrfs-ublk prefetch NAME --status
btrfs-ublk prefetch NAME --cancel
btrfs-ublk device status NAME
btrfs-ublk device recover NAME
btrfs-ublk device upgrade NAME
python "$PROJECT/tests/support/children/longer.py" lazy.json > longer.json
btrfs-ublk device update NAME longer.json
btrfs-ublk device down NAME
1: btrfs-ublk device status NAME 2> /dev/null || false
""",
    ),
    "volumes": Scenario(
        (ROOT, BTRFS, LOOP, FUSE, MOUNT, Helper(MKSEED), Helper(SERVER)),
        r"""
head -c 8M /dev/urandom > image.raw
btrfs-ublk volume up images --front-end fuse --mount "$PWD/mnt" \
    --add-file "debian.img=$PWD/image.raw"
cmp image.raw mnt/debian.img
btrfs-ublk map-physical mnt/debian.img
btrfs-ublk volume clone images part --offset 0 --length 4M
cmp --bytes=4M image.raw mnt/part
btrfs-ublk volume status images
btrfs-ublk volume list
btrfs-ublk volume resize images 20G
btrfs-ublk volume add-file images "more.img=$PWD/image.raw"
cmp image.raw mnt/more.img
btrfs-ublk volume remove-file images more.img --yes
btrfs-ublk volume down images
btrfs-ublk volume up images
cmp image.raw mnt/debian.img
btrfs-ublk volume down images
1: btrfs-ublk volume status images
btrfs-ublk volume remove images --yes
printf 'front_end = "fuse"\nmount = "%s/mnt"\n' "$PWD" > volume.toml
btrfs-ublk volume up other --file volume.toml
btrfs-ublk volume down other
btrfs-ublk volume remove other --yes
""",
    ),
    "demo": Scenario(
        (ROOT, BTRFS, LOOP, FUSE, MOUNT, Helper(MKSEED), Helper(SERVER)),
        r"""
cd "$PROJECT" && scripts/demo --front-end fuse
""",
    ),
    "results": Scenario(
        REPORT_PACKAGES,
        r"""
cp "$PROJECT"/benchmark_matrix_results/native-2cpu/matrix-quick.jsonl results.jsonl
btrfs-ublk bench summarize < results.jsonl
btrfs-ublk bench report results.jsonl -o report.html --plots plots
btrfs-ublk bench compare --list
""",
    ),
}

#: By command and options.
ELSEWHERE = {
    "btrfs-ublk image list --registry --new": (
        "tests/unit/image/test_catalogue.py::test_versions_and_what_is_new_in_them"
    ),
    "btrfs-ublk image warm --site": (
        "tests/unit/image/test_warm.py"
        "::test_after_it_hosts_cost_the_registry_nothing"
    ),
    "btrfs-ublk image warm --trace": (
        "tests/unit/image/test_warm.py::test_what_a_trace_has_read_of_layers"
    ),
    "btrfs-ublk site-cache check --object --token-file": (
        "tests/system/sites/test_site_cache.py::test_the_command_says_what_is_wrong"
    ),
    "btrfs-ublk bench compare": (
        "tests/bench/test_compare.py::TestCommand::test_peers_in_turn"
    ),
    "btrfs-ublk bench matrix --matrix --output": (
        "tests/bench/test_matrix_command.py::TestForReal"
        "::test_killed_twice_it_has_the_same_runs"
    ),
    "btrfs-ublk device up --feature": (
        "tests/device/server/test_ublk_zero_copy.py::test_servers_die_and_are_replaced"
    ),
    "btrfs-ublk events": "tests/device/life/test_events.py::test_a_server_is_killed",
    "btrfs-ublk events --json": (
        "tests/device/life/test_events.py::test_a_server_is_killed"
    ),
    "btrfs-ublk map add --s3 --endpoint --credentials-file": (
        "tests/device/lazy/test_remote.py::test_added_by_command"
    ),
    "btrfs-ublk map add --oci --docker-config": (
        "tests/device/lazy/test_remote.py::test_added_by_command"
    ),
    "btrfs-ublk metrics --listen": (
        "tests/device/life/test_monitor.py::test_answers_scrapers"
    ),
    "btrfs-ublk snapshotter config --diff --name": (
        "tests/unit/ops/test_doctor_containerd.py::test_the_plugin_has_another_name"
    ),
    "btrfs-ublk snapshotter status": (
        "tests/system/containers/test_snapshotter.py::test_status_of_one_that_serves"
    ),
    "scripts/package": "scripts/lib/testrun.py",
    "scripts/setup --test": "apply-lint.sh",
    "scripts/torture --list": (
        "tests/campaigns/test_torture.py::test_all_campaigns_are_listed"
    ),
    "scripts/torture --rounds --seed": (
        "tests/campaigns/test_torture.py::test_killed_commands_of_images"
    ),
    "scripts/test": ".ci/run",
    "scripts/test --quick --all": ".ci/run",
    "apply-lint.sh": "scripts/lib/testrun.py",
    "btrfs-ublk volume up --complete": (
        "tests/device/lazy/test_complete.py::test_a_volume_needs_no_server_in_the_end"
    ),
}
