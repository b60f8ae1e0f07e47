"""Types of answers about batches."""

from __future__ import annotations

from typing import Annotated, Literal

from server.schema.answers_common import Answer
from server.schema.answers_files import FirstId, HasMore, LastId
from server.schema.fields import said

At = Annotated[int | None, said("When the batch came to this status, in seconds since 1970; null: it did not.")]


class BatchError(Answer):
    """What is wrong with the file of a batch."""

    code: Annotated[str, said("A stable word for the error.", "duplicate_custom_id")]
    message: Annotated[str, said("The error and how to repair it.")]
    line: Annotated[int | None, said("The number of the line, from 1; null: the whole file.")]
    param: Annotated[str | None, said("The field of the line.")]


class BatchErrors(Answer):
    """The first errors of a batch's file."""

    object: Annotated[Literal["list"], said("The kind of this object.")]
    data: Annotated[list[BatchError], said("At most 100 errors.")]


class BatchCounts(Answer):
    """Numbers of lines."""

    total: Annotated[int, said("Lines of the file.")]
    completed: Annotated[int, said("Lines with an answer.")]
    failed: Annotated[int, said("Lines that were refused or ran out of time.")]


class BatchInputDetails(Answer):
    """Parts of the prompts' tokens."""

    cached_tokens: Annotated[int, said("Tokens that the prefix cache had.")]


class BatchOutputDetails(Answer):
    """Parts of the generated tokens."""

    reasoning_tokens: Annotated[int, said("Tokens of thinking.")]


class BatchUsage(Answer):
    """Tokens of all answers so far."""

    input_tokens: Annotated[int, said("Tokens of the prompts.")]
    input_tokens_details: Annotated[BatchInputDetails, said("Parts of them.")]
    output_tokens: Annotated[int, said("Generated tokens.")]
    output_tokens_details: Annotated[BatchOutputDetails, said("Parts of them.")]
    total_tokens: Annotated[int, said("The sum of both.")]


class Batch(Answer):
    """A batch."""

    id: Annotated[str, said("The id of the batch.", "batch_5f0c")]
    object: Annotated[Literal["batch"], said("The kind of this object.")]
    endpoint: Annotated[str, said("The path of all requests.", "/v1/chat/completions")]
    model: Annotated[str | None, said("The model that the first line names.")]
    errors: Annotated[BatchErrors | None, said("The reasons of a failed batch.")]
    input_file_id: Annotated[str, said("The id of the file with the requests.")]
    completion_window: Annotated[str, said("The time for the whole batch.", "24h")]
    status: Annotated[
        Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"],
        said("The state of the batch."),
    ]
    output_file_id: Annotated[str | None, said("The file of the answers, at the end; null: there are none.")]
    error_file_id: Annotated[str | None, said("The file of the errors, at the end; null: there are none.")]
    created_at: Annotated[int, said("When the batch was made, in seconds since 1970.")]
    in_progress_at: At
    expires_at: Annotated[int, said("When the lines that have no answer expire, in seconds since 1970.")]
    finalizing_at: At
    completed_at: At
    failed_at: At
    expired_at: At
    cancelling_at: At
    cancelled_at: At
    request_counts: Annotated[BatchCounts, said("Numbers of lines.")]
    usage: Annotated[BatchUsage, said("Tokens of all answers so far.")]
    metadata: Annotated[dict[str, str] | None, said("The texts that the client sent.")]


class BatchList(Answer):
    """A page of batches."""

    object: Annotated[Literal["list"], said("The kind of this object.")]
    data: Annotated[list[Batch], said("The batches.")]
    first_id: FirstId
    last_id: LastId
    has_more: HasMore
