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
_LABELS = "map"
_NONE = ("", "")

#: Name of a message: its fields in the order of their numbers; "" has none. A type is
#: "string", "bytes", "int64", "kind", "map" (of texts), or a message's full name; "*"
#: means many.
_MESSAGES: dict[str, list[tuple[str, str]]] = {
    "PrepareSnapshotRequest": [
        ("snapshotter", "string"),
        ("key", "string"),
        ("parent", "string"),
        ("labels", _LABELS),
    ],
    "PrepareSnapshotResponse": [("mounts", f"*{_MOUNT}")],
    "ViewSnapshotRequest": [
        ("snapshotter", "string"),
        ("key", "string"),
        ("parent", "string"),
        ("labels", _LABELS),
    ],
    "ViewSnapshotResponse": [("mounts", f"*{_MOUNT}")],
    "MountsRequest": [("snapshotter", "string"), ("key", "string")],
    "MountsResponse": [("mounts", f"*{_MOUNT}")],
    "RemoveSnapshotRequest": [("snapshotter", "string"), ("key", "string")],
    "CommitSnapshotRequest": [
        ("snapshotter", "string"),
        ("name", "string"),
        ("key", "string"),
        ("labels", _LABELS),
        ("parent", "string"),  # since containerd 2.1
    ],
    "StatSnapshotRequest": [("snapshotter", "string"), ("key", "string")],
    "Info": [
        ("name", "string"),
        ("parent", "string"),
        ("kind", "kind"),
        ("created_at", _TIME),
        ("updated_at", _TIME),
        ("labels", _LABELS),
    ],
    "StatSnapshotResponse": [("info", f".{PACKAGE}.Info")],
    "UpdateSnapshotRequest": [
        ("snapshotter", "string"),
        ("info", f".{PACKAGE}.Info"),
        ("update_mask", ".google.protobuf.FieldMask"),
    ],
    "UpdateSnapshotResponse": [("info", f".{PACKAGE}.Info")],
    "ListSnapshotsRequest": [("snapshotter", "string"), ("filters", "*string")],
    "ListSnapshotsResponse": [("info", f"*.{PACKAGE}.Info")],
    "UsageRequest": [("snapshotter", "string"), ("key", "string")],
    "UsageResponse": [("size", "int64"), ("inodes", "int64")],
    "CleanupRequest": [("snapshotter", "string")],
    # api/services/diff/v1/diff.proto, api/types/descriptor.proto
    "DiffRequest": [
        ("left", f"*{_MOUNT}"),
        ("right", f"*{_MOUNT}"),
        ("media_type", "string"),
        ("ref", "string"),
        ("labels", _LABELS),
        ("source_date_epoch", _TIME),
    ],
    "DiffResponse": [_NONE, _NONE, ("diff", f".{PACKAGE}.Descriptor")],
    "Descriptor": [("media_type", "string"), ("digest", "string"), ("size", "int64")],
    # api/services/content/v1/content.proto
    "WriteContentRequest": [
        ("action", "int64"),  # an enum, which is the same on the wire
        ("ref", "string"),
        ("total", "int64"),
        _NONE,
        ("offset", "int64"),
        ("data", "bytes"),
        ("labels", _LABELS),
    ],
    "ContentInfo": [("digest", "string"), _NONE, _NONE, _NONE, ("labels", _LABELS)],
    "UpdateContentRequest": [
        ("info", f".{PACKAGE}.ContentInfo"),
        ("update_mask", ".google.protobuf.FieldMask"),
    ],
    # api/services/leases/v1/leases.proto
    "CreateRequest": [("id", "string"), _NONE, ("labels", _LABELS)],
}
#: api/types/mount.proto
_MOUNT_FIELDS = [
    ("type", "string"),
    ("source", "string"),
    ("target", "string"),
    ("options", "*string"),
]

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


def _describe(
    message: descriptor_pb2.DescriptorProto,
    name: str,
    fields: list[tuple[str, str]],
    full_name: str,
) -> None:
    message.name = name
    for number, (field_name, kind) in enumerate(fields, start=1):
        if (field_name, kind) == _NONE:
            continue
        field = message.field.add(name=field_name, number=number)
        many = kind.startswith("*") or kind == _LABELS
        field.label = _Field.LABEL_REPEATED if many else _Field.LABEL_OPTIONAL
        match kind.removeprefix("*"):
            case "string":
                field.type = _Field.TYPE_STRING
            case "bytes":
                field.type = _Field.TYPE_BYTES
            case "int64":
                field.type = _Field.TYPE_INT64
            case "kind":
                field.type = _Field.TYPE_ENUM
                field.type_name = f".{PACKAGE}.Kind"
            case "map":
                # How a map is encoded: entries of a nested message.
                entry = message.nested_type.add()
                _describe(
                    entry,
                    "LabelsEntry",
                    [("key", "string"), ("value", "string")],
                    f"{full_name}.LabelsEntry",
                )
                entry.options.map_entry = True
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f"{full_name}.LabelsEntry"
            case type_name:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = type_name


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
