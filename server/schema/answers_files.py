"""Types of answers about uploaded files."""

from __future__ import annotations

from typing import Annotated, Literal

from server.schema.answers_common import Answer
from server.schema.fields import said

FileId = Annotated[str, said("The id of the file.", "file-5f0c")]
FirstId = Annotated[str | None, said("The id of the page's first object; null if the page is empty.")]
LastId = Annotated[str | None, said("The id of the page's last object; null if the page is empty.")]
HasMore = Annotated[bool, said("Whether objects follow this page.")]


class File(Answer):
    """A stored file."""

    id: FileId
    object: Annotated[Literal["file"], said("The kind of this object.")]
    bytes: Annotated[int, said("The size of the content.", 1024)]
    created_at: Annotated[int, said("When the file was stored, in seconds since 1970.", 1790000000)]
    expires_at: Annotated[int | None, said("When the file is deleted, in seconds since 1970; null: never.")]
    filename: Annotated[str, said("The client's name of the file.", "requests.jsonl")]
    purpose: Annotated[Literal["batch", "batch_output"], said("Whether a client or a batch made the file.")]
    status: Annotated[Literal["processed"], said("Always processed: a listed file is complete.")]
    status_details: Annotated[None, said("Always null.")]


class FileList(Answer):
    """A page of files."""

    object: Annotated[Literal["list"], said("The kind of this object.")]
    data: Annotated[list[File], said("The files.")]
    first_id: FirstId
    last_id: LastId
    has_more: HasMore


class DeletedFile(Answer):
    """The file is deleted."""

    id: FileId
    object: Annotated[Literal["file"], said("The kind of this object.")]
    deleted: Annotated[bool, said("Always true.")]
