"""``btrfs-ublk seed``"""

from __future__ import annotations

import json
from pathlib import Path
from uuid import UUID

import click

from btrfs_ublk.seed import DEFAULT_FILENAME, make_seed
from btrfs_ublk.units import format_size, parse_block_size


@click.group("seed")
def command() -> None:
    """Make seeds: btrfs templates whose data blocks come from a block server."""


@command.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--virtual-data-size", default="4E", show_default=True, metavar="SIZE")
@click.option("--virtual-data-filename", default=DEFAULT_FILENAME, show_default=True)
@click.option("--chunk-size", metavar="SIZE", help="Length of a chunk.  [255T]")
@click.option("--label", help="Label of the file system.")
@click.option("--fsid", type=click.UUID, help="UUID of the file system.  [random]")
@click.option("--device-uuid", type=click.UUID, help="UUID of the device.  [derived]")
@click.option("--time", type=int, help="All timestamps, seconds since 1970.  [now]")
@click.option("--metadata-only", is_flag=True, help="Keep only what a server stores.")
@click.option("--force", is_flag=True, help="Replace PATH.")
@click.option("--json", "as_json", is_flag=True, help="Print the seed as JSON.")
def create(
    path: Path,
    virtual_data_size: str,
    virtual_data_filename: str,
    chunk_size: str | None,
    label: str | None,
    fsid: UUID | None,
    device_uuid: UUID | None,
    time: int | None,
    metadata_only: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write a seed image to PATH. Needs no privileges."""
    seed = make_seed(
        path,
        virtual_data_size=parse_block_size(
            virtual_data_size, what="--virtual-data-size"
        ),
        virtual_data_filename=virtual_data_filename,
        chunk_bytes=(
            None
            if chunk_size is None
            else parse_block_size(chunk_size, what="--chunk-size")
        ),
        label=label,
        fsid=fsid,
        device_uuid=device_uuid,
        time=time,
        metadata_only=metadata_only,
        force=force,
    )
    if as_json:
        click.echo(json.dumps(seed.to_dict()))
        return
    virtual = seed.virtual_data
    click.echo(f"{seed.path}: btrfs seed {seed.fsid}")
    click.echo(f"  virtual data  {format_size(virtual.size)} in {virtual.filename}")
    click.echo(
        f"  chunks        {seed.chunks} of up to {format_size(seed.chunk_bytes)}"
    )
    click.echo(f"  metadata      {format_size(seed.metadata_bytes)}")
