"""The operations of files and batches, for /openapi.json."""

from __future__ import annotations

from server.openapi import PAGED, Operation, work
from server.schema import answers_batches as batches
from server.schema import answers_files as stored
from server.schema.batches import BatchBody
from server.schema.files import FileForm

PURPOSE = ("purpose", "string", "Only files that a client (batch) or a batch (batch_output) made.")

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/files"): work(
        "create_file", "Batches", "Store a file of requests", FileForm, stored.File, sent_as="multipart/form-data",
        file="The requests, a JSON object in each line.",
    ),
    ("GET", "/v1/files"): Operation(
        "list_files", "Batches", "The stored files of a key", stored.FileList, query=(*PAGED, PURPOSE)
    ),
    ("GET", "/v1/files/{id}"): Operation("get_file", "Batches", "A stored file", stored.File),
    ("DELETE", "/v1/files/{id}"): Operation("delete_file", "Batches", "Delete a file", stored.DeletedFile),
    ("GET", "/v1/files/{id}/content"): Operation(
        "get_file_content", "Batches", "The bytes of a file", media="application/octet-stream"
    ),
    ("POST", "/v1/batches"): work(
        "create_batch", "Batches", "Answer the requests of a file when there is room", BatchBody, batches.Batch
    ),
    ("GET", "/v1/batches"): Operation(
        "list_batches", "Batches", "The batches of a key", batches.BatchList, query=PAGED
    ),
    ("GET", "/v1/batches/{id}"): Operation("get_batch", "Batches", "The state of a batch", batches.Batch),
    ("POST", "/v1/batches/{id}/cancel"): Operation("cancel_batch", "Batches", "End a batch", batches.Batch),
}  # fmt: skip
