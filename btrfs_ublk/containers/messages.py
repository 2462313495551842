"""The messages of containerd's snapshots API, version 1
(api/services/snapshots/v1/snapshots.proto of containerd 1.4 to 2.x), and those of its
others that `differ` has to know (diff, content and leases, all version 1).

They are described here by tables of fields, from which protobuf makes the classes. A
generated module would have to be generated again for each version of protobuf.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    empty_pb2,
    field_mask_pb2,
    message_factory,
    timestamp_pb2,
)

PACKAGE = "containerd.services.snapshots.v1"
SERVICE = f"{PACKAGE}.Snapshots"

#: enum Kind
VIEW, ACTIVE, COMMITTED = 1, 2, 3
KIND_NAMES = {VIEW: "view", ACTIVE: "active", COMMITTED: "committed"}

_MOUNT = ".containerd.types.Mount"
_TIME = ".google.protobuf.Timestamp"
_MASK = ".google.protobuf.FieldMask"

#: Name of a message: its fields in the order of their numbers; "-" has none. A type is
#: "string" if none is written, "bytes", "int64", "kind", "map" (of texts), or a
#: message's full name; "*" means many.
_MESSAGES = {
    "PrepareSnapshotRequest": "snapshotter key parent labels:map",
    "PrepareSnapshotResponse": f"mounts:*{_MOUNT}",
    "ViewSnapshotRequest": "snapshotter key parent labels:map",
    "ViewSnapshotResponse": f"mounts:*{_MOUNT}",
    "MountsRequest": "snapshotter key",
    "MountsResponse": f"mounts:*{_MOUNT}",
    "RemoveSnapshotRequest": "snapshotter key",
    # It has a parent since containerd 2.1.
    "CommitSnapshotRequest": "snapshotter name key labels:map parent",
    "StatSnapshotRequest": "snapshotter key",
    "Info": (f"name parent kind:kind created_at:{_TIME} updated_at:{_TIME} labels:map"),
    "StatSnapshotResponse": f"info:.{PACKAGE}.Info",
    "UpdateSnapshotRequest": f"snapshotter info:.{PACKAGE}.Info update_mask:{_MASK}",
    "UpdateSnapshotResponse": f"info:.{PACKAGE}.Info",
    "ListSnapshotsRequest": "snapshotter filters:*string",
    "ListSnapshotsResponse": f"info:*.{PACKAGE}.Info",
    "UsageRequest": "snapshotter key",
    "UsageResponse": "size:int64 inodes:int64",
    "CleanupRequest": "snapshotter",
    # api/services/diff/v1/diff.proto, api/types/descriptor.proto
    "DiffRequest": (
        f"left:*{_MOUNT} right:*{_MOUNT} media_type ref labels:map "
        f"source_date_epoch:{_TIME}"
    ),
    "DiffResponse": f"- - diff:.{PACKAGE}.Descriptor",
    "Descriptor": "media_type digest size:int64",
    # api/services/content/v1/content.proto; an enum is an int64 on the wire
    "WriteContentRequest": (
        "action:int64 ref total:int64 - offset:int64 data:bytes labels:map"
    ),
    "ContentInfo": "digest - - - labels:map",
    "UpdateContentRequest": f"info:.{PACKAGE}.ContentInfo update_mask:{_MASK}",
    # api/services/leases/v1/leases.proto
    "CreateRequest": "id - labels:map",
}
#: api/types/mount.proto
_MOUNT_FIELDS = "type source target options:*string"

#: Name of a call: its request, and its response.
CALLS = {
    "Prepare": ("PrepareSnapshotRequest", "PrepareSnapshotResponse"),
    "View": ("ViewSnapshotRequest", "ViewSnapshotResponse"),
    "Mounts": ("MountsRequest", "MountsResponse"),
    "Commit": ("CommitSnapshotRequest", "Empty"),
    "Remove": ("RemoveSnapshotRequest", "Empty"),
    "Stat": ("StatSnapshotRequest", "StatSnapshotResponse"),
    "Update": ("UpdateSnapshotRequest", "UpdateSnapshotResponse"),
    "List": ("ListSnapshotsRequest", "ListSnapshotsResponse"),  # a stream of responses
    "Usage": ("UsageRequest", "UsageResponse"),
    "Cleanup": ("CleanupRequest", "Empty"),
}

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "": _Field.TYPE_STRING,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "int64": _Field.TYPE_INT64,
}


def _describe(
    message: descriptor_pb2.DescriptorProto, name: str, fields: str, full_name: str
) -> None:
    message.name = name
    for number, (field_name, _, kind) in enumerate(
        (each.partition(":") for each in fields.split()), start=1
    ):
        if field_name == "-":
            continue
        field = message.field.add(name=field_name, number=number)
        many = kind.startswith("*") or kind == "map"
        field.label = _Field.LABEL_REPEATED if many else _Field.LABEL_OPTIONAL
        kind = kind.removeprefix("*")
        if kind in _TYPES:
            field.type = _TYPES[kind]
        elif kind == "kind":
            field.type = _Field.TYPE_ENUM
            field.type_name = f".{PACKAGE}.Kind"
        else:
            field.type = _Field.TYPE_MESSAGE
            field.type_name = kind
        if kind == "map":
            # How a map is encoded: entries of a nested message.
            field.type_name = f"{full_name}.LabelsEntry"
            entry = message.nested_type.add()
            _describe(entry, "LabelsEntry", "key value", field.type_name)
            entry.options.map_entry = True


def _make_classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    for module in (empty_pb2, field_mask_pb2, timestamp_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    mount = descriptor_pb2.FileDescriptorProto(
        name="mount.proto", package="containerd.types", syntax="proto3"
    )
    _describe(mount.message_type.add(), "Mount", _MOUNT_FIELDS, _MOUNT)
    pool.AddSerializedFile(mount.SerializeToString())
    file = descriptor_pb2.FileDescriptorProto(
        name="snapshots.proto",
        package=PACKAGE,
        syntax="proto3",
        dependency=[
            "mount.proto",
            *(
                module.DESCRIPTOR.name
                for module in (empty_pb2, field_mask_pb2, timestamp_pb2)
            ),
        ],
    )
    kind = file.enum_type.add(name="Kind")
    for number, name in enumerate(("UNKNOWN", "VIEW", "ACTIVE", "COMMITTED")):
        kind.value.add(name=name, number=number)
    for name, fields in _MESSAGES.items():
        _describe(file.message_type.add(), name, fields, f".{PACKAGE}.{name}")
    pool.AddSerializedFile(file.SerializeToString())
    names = {name: f"{PACKAGE}.{name}" for name in _MESSAGES}
    names |= {"Mount": "containerd.types.Mount", "Empty": "google.protobuf.Empty"}
    return {
        name: _class_of(pool.FindMessageTypeByName(full_name))
        for name, full_name in names.items()
    }


def _class_of(descriptor: Any) -> Any:
    """Return the class of a message; Debian 12's protobuf has the older function."""
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(descriptor)
    factory: Any = message_factory.MessageFactory(descriptor.file.pool)
    return factory.GetPrototype(descriptor)


#: The classes of all messages, by their names without the package.
CLASSES = _make_classes()
