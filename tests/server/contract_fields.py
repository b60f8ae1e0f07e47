"""For each type of a body: tests, and the fields of requests that each test guards (it fails if they are ignored).

test_contract_fields.py compares this table with the types of bodies. It fails for a field without a test, for a
test that no longer exists, and for a test that no longer mentions the field. Its long form ignores each field in turn
and runs the field's test, which must fail. Fields that inherit their handling (CompletionBody from SamplingFields) are
named again where the route itself handles them.
"""

from __future__ import annotations

import msgspec

from server.dialects.cohere.schema import CohereEmbedBody
from server.dialects.decisions.schema import DecidingBody, DecisionsBody, LabelScoreBody, SystemOneBody
from server.dialects.llama_cpp import schema as llama_cpp
from server.dialects.ollama import schema as ollama
from server.dialects.sagemaker.schema import InvocationBody
from server.dialects.sglang.schema import SglangAbortBody, SglangBody
from server.dialects.tei.schema import SharedRerankBody, TeiEmbedBody, TeiFields, TeiPredictBody, TeiTokensBody
from server.schema.audio import SampledForm, SpeechForm, TranscriptionForm, TranslationForm
from server.schema.batches import BatchBody, OutputExpiry
from server.schema.chat import ChatBody
from server.schema.common import RepetitionFields, SamplingFields, StreamOptions
from server.schema.completion import CompletionBody
from server.schema.files import FileForm
from server.schema.generate import Features, GenerateBody, Place, TokenSampling
from server.schema.lora import LoadAdapterBody, UnloadAdapterBody
from server.schema.messages import CountBody, MessagesBody, SampledMessages
from server.schema.pooling import (
    ClassifyBody,
    EmbeddingBody,
    InputFields,
    PoolingBody,
    RerankBody,
    ScoreBody,
    VectorsBody,
)
from server.schema.responses import InputBody, ReasoningOptions, ResponsesBody, SampledInput, TextOptions
from server.schema.samplers import SamplerFields
from server.schema.tokenize import AbortBody, DetokenizeBody, TokenizeBody

ENGINE = "jobs/test_sampling_fields.py::test_the_field_reaches_the_engine"
ANSWER = "jobs/test_sampling_fields.py::test_the_field_reaches_the_answer"
PROMPT = "jobs/test_sampling_fields.py::test_the_prompt_is_made_as_asked"
STRUCTURE = "structure/test_structured_answers.py::test_every_route_holds_answers_to_a_schema"
REFUSED = "test_errors.py::test_what_this_server_cannot_do_is_named"
BAD = "test_errors.py::test_bad_fields_are_refused_by_name"
HASHES = "routes/test_tokens.py::test_s24_spans_and_hashes_are_recomputed_and_compared"
RENDERED = "routes/test_tokens.py::test_a_rendered_conversation_is_answered_as_the_conversation_itself"
ADAPTERS = "routes/test_adapters.py::"
EMBEDDINGS = "pooling/test_embeddings.py::"
BAD_INPUTS = EMBEDDINGS + "test_bad_input_is_400_and_says_where"
ECHO = "routes/test_responses.py::test_echo_follows_the_request"

VECTORS = "dialects/test_vectors.py::"
DECISIONS = "dialects/test_decisions.py::"
AUDIO = "speech/test_audio.py::"
LLAMA_CPP = "dialects/test_llama_cpp.py::"
PROGRESS = "routes/test_prompt_progress.py::test_a_stream_reports_each_step_of_its_prompt_and_answers_the_same"
SGLANG = "dialects/test_sglang.py::"
OLLAMA = "dialects/test_ollama.py::"
REFUSED_HERE = OLLAMA + "test_wrong_bodies_are_refused_by_the_clients_names"
EXPERTS = "routes/test_routed_experts.py::test_routes_without_a_place_for_experts_refuse_by_name"

SAMPLERS = (
    "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers top_n_sigma xtc_probability "
    "xtc_threshold"
)

TESTS: dict[type[msgspec.Struct], dict[str, str]] = {
    SamplingFields: {
        "routes/test_route_fields.py::test_an_answer_is_as_long_as_asked": "max_tokens",
        ENGINE: "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed "
        "ignore_eos stop_token_ids min_tokens logit_bias allowed_token_ids bad_words prompt_logprobs logprob_token_ids",
        ANSWER: "n stop include_stop_str_in_output stream stream_interval use_beam_search length_penalty",
        REFUSED: "model",
        STRUCTURE: "response_format structured_outputs",
        "routes/test_chat.py::test_continuous_usage_runs_on_every_chunk": "stream_options",
        "routes/test_route_fields.py::test_special_tokens_are_put_before_a_conversation_if_asked": "add_special_tokens",
        "jobs/test_sampling_fields.py::test_special_tokens_are_added_and_skipped_as_asked": "skip_special_tokens",
        "jobs/test_sampling_fields.py::test_truncation_keeps_the_side_that_was_asked_for": "truncate_prompt_tokens "
        "truncation_side",
        "jobs/test_sampling_fields.py::test_priority_goes_by_field_or_header_where_the_policy_looks_at_it": "priority",
        "routes/test_chat.py::test_second_identical_prompt_is_cached": "cache_salt",
        "jobs/test_sampling_fields.py::test_request_id_names_the_answer": "request_id",
        "routes/test_chat.py::test_token_ids_are_returned_when_asked": "return_token_ids",
        "routes/test_routed_experts.py::test_completions_have_arrays_of_prompts_and_choices": "return_routed_experts",
        "jobs/test_sampling_fields.py::test_tokens_are_written_as_ids_by_field_or_flag": "return_tokens_as_token_ids",
        "jobs/test_sampling_fields.py::test_repetition_ends_an_answer": "repetition_detection",
        PROGRESS: "return_progress",
    },
    SamplerFields: {ENGINE: SAMPLERS},
    SampledInput: {"routes/test_responses.py::test_sampling_fields_reach_the_engine": SAMPLERS},
    SampledMessages: {"routes/test_messages.py::test_sampling_fields_reach_the_engine": SAMPLERS},
    StreamOptions: {
        "routes/test_chat.py::test_stream_comes_in_the_exact_order_and_equals_the_whole_answer": "include_usage",
        "routes/test_chat.py::test_continuous_usage_runs_on_every_chunk": "continuous_usage_stats",
    },
    BatchBody: {
        "routes/test_batches.py::test_wrong_bodies_are_refused_by_name": "input_file_id endpoint completion_window "
        "metadata output_expires_after",
    },
    OutputExpiry: {"routes/test_batches.py::test_wrong_bodies_are_refused_by_name": "anchor seconds"},
    FileForm: {
        "routes/test_files.py::test_the_form_s_fields_are_checked_by_name": "purpose anchor seconds",
    },
    RepetitionFields: {
        "jobs/test_sampling_fields.py::test_rules_of_repetition_are_read_as_sent": "max_pattern_size min_pattern_size "
        "min_count",
    },
    ChatBody: {
        "routes/test_chat.py::test_developer_role_and_template_variables_reach_the_template": "messages",
        "jobs/test_sampling_fields.py::test_max_completion_tokens_wins": "max_completion_tokens",
        "routes/test_chat.py::test_logprobs_hold_exactly_the_likeliest": "logprobs top_logprobs",
        "routes/test_tools.py::test_tools_that_may_not_be_called_can_stay_out_of_the_prompt": "tools tool_choice",
        "routes/test_route_fields.py::test_effort_reaches_the_template_of_chat": "reasoning_effort",
        "structure/test_forced_calls.py::test_reasoning_ends_when_its_budget_is_spent": "thinking_token_budget",
        "routes/test_tool_calls.py::test_one_call_and_several_choices": "parallel_tool_calls",
        "routes/test_tool_calls.py::test_reasoning_is_hidden_or_named_as_asked": "include_reasoning",
        REFUSED: "mm_processor_kwargs media_io_kwargs modalities functions function_call",
        PROMPT: "chat_template chat_template_kwargs add_generation_prompt documents return_prompt_text",
        "routes/test_chat.py::test_last_message_can_be_continued": "continue_final_message",
        "jobs/test_sampling_fields.py::test_echo_says_the_last_message_again_before_the_answer": "echo",
    },
    CompletionBody: {
        "routes/test_completion.py::test_choices_come_prompt_by_prompt": "prompt n",
        "routes/test_completion.py::test_a_gap_between_prompt_and_suffix_is_filled": "suffix",
        "jobs/test_prompt_rows.py::test_rows_do_what_their_tokens_do": "prompt_embeds",
        "routes/test_completion.py::test_echo_with_logprobs_covers_prompt_and_output": "logprobs echo",
        "routes/test_route_fields.py::test_a_completion_is_made_as_asked": "max_tokens stop include_stop_str_in_output "
        "add_special_tokens skip_special_tokens truncate_prompt_tokens truncation_side return_token_ids "
        "return_tokens_as_token_ids request_id prompt_logprobs cache_salt priority stream stream_options "
        "stream_interval use_beam_search repetition_detection response_format structured_outputs model",
    },
    InputBody: {
        "routes/test_responses_store.py::test_text_and_items_are_the_same": "input",
        "routes/test_route_fields.py::test_an_unknown_model_is_404_on_every_route": "model",
        ECHO: "instructions parallel_tool_calls text reasoning tools tool_choice",
        "routes/test_responses.py::test_stop_strings_and_fields_of_chat_have_effect": "chat_template_kwargs",
        "routes/test_responses_store.py::test_a_conversation_goes_on_without_its_instructions": "previous_response_id",
        "routes/test_responses.py::test_over_long_input_is_refused_or_cut_as_asked": "truncation",
        "routes/test_responses.py::test_what_cannot_be_done_yet_is_refused_by_name": "conversation prompt",
    },
    ResponsesBody: {
        ECHO: "store",
        "routes/test_responses.py::test_sampling_fields_reach_the_engine": "max_output_tokens temperature top_p top_k "
        "min_p presence_penalty frequency_penalty repetition_penalty seed ignore_eos stop_token_ids logit_bias "
        "cache_salt",
        "routes/test_responses.py::test_stop_strings_and_fields_of_chat_have_effect": "stop include_stop_str_in_output "
        "structured_outputs",
        "routes/test_responses.py::test_events_are_exactly_these_bytes": "stream",
        "routes/test_route_fields.py::test_a_gateways_priority_has_effect_in_every_dialect": "priority",
        "routes/test_route_fields.py::test_special_tokens_of_a_response_are_visible_on_request": "skip_special_tokens",
        "routes/test_responses.py::test_logprobs_are_given_when_included": "include top_logprobs",
        "routes/test_responses_store.py::test_background_response_is_queued_then_polled_to_its_end": "metadata "
        "background",
        "routes/test_route_fields.py::test_what_a_response_echoes_unchanged": "user prompt_cache_key",
        EXPERTS: "return_routed_experts",
        PROGRESS: "return_progress",
    },
    ReasoningOptions: {
        "routes/test_responses_store.py::test_effort_reaches_the_template": "effort",
        ECHO: "summary",
    },
    TextOptions: {
        STRUCTURE: "format",
        ECHO: "verbosity",
    },
    SampledForm: {
        AUDIO + "test_sampling_fields_reach_the_engine": "temperature top_p top_k min_p seed frequency_penalty "
        "presence_penalty repetition_penalty",
    },
    SpeechForm: {
        AUDIO + "test_fields_other_than_sampling_have_effect": "model max_completion_tokens priority cache_salt",
        AUDIO + "test_the_instruction_is_the_operators_with_the_clients_words_behind_it": "prompt",
        AUDIO + "test_every_form_holds_the_same_words": "response_format",
        AUDIO + "test_a_stream_serves_both_families_of_clients": "stream stream_include_usage "
        "stream_continuous_usage_stats",
        AUDIO + "test_a_stream_reports_how_far_each_window_is": "return_progress",
        AUDIO + "test_wrong_input_is_refused_by_name": "hotwords n use_beam_search",
    },
    TranscriptionForm: {
        AUDIO + "test_verbose_json_computes_its_numbers_as_whisper_does": "language",
        AUDIO + "test_wrong_input_is_refused_by_name": "timestamp_granularities",
        "speech/test_audio_fields.py::test_log_probabilities_of_a_transcript_are_those_of_its_tokens": "include",
    },
    TranslationForm: {
        AUDIO + "test_the_instruction_is_the_operators_with_the_clients_words_behind_it": "to_language",
    },
    CountBody: {
        "routes/test_route_fields.py::test_an_unknown_model_is_404_on_every_route": "model",
        "routes/test_messages_prompt.py::test_system_text_goes_first_as_string_or_blocks": "messages system",
        "routes/test_messages_prompt.py::test_tools_are_in_the_prompt_when_none_may_be_called": "tools",
        "routes/test_messages_prompt.py::test_a_choice_of_tools_is_checked_where_tokens_are_counted": "tool_choice",
        "routes/test_messages_prompt.py::test_thinking_and_effort_reach_the_template": "thinking output_config",
        "routes/test_messages_prompt.py::test_template_variables_of_the_request_win": "chat_template_kwargs",
        "routes/test_messages.py::test_what_the_cache_gave_is_counted_apart": "cache_salt",
    },
    MessagesBody: {
        "routes/test_messages.py::test_sampling_fields_reach_the_engine": "max_tokens temperature top_p top_k",
        "routes/test_messages.py::test_stop_sequence_ends_the_answer_and_is_named": "stop_sequences",
        "routes/test_messages.py::test_bad_fields_are_named_in_the_protocols_own_body": "thread",
        "routes/test_messages.py::test_events_are_exactly_these_bytes": "stream",
        "routes/test_route_fields.py::test_a_gateways_priority_has_effect_in_every_dialect": "priority",
        STRUCTURE: "output_format",
        EXPERTS: "return_routed_experts",
        PROGRESS: "return_progress",
    },
    TokenizeBody: {
        "routes/test_route_fields.py::test_an_unknown_model_is_404_on_every_route": "model",
        "http/test_edge.py::test_tokenize_and_detokenize_go_round": "prompt messages return_token_strs",
        "routes/test_tools.py::test_s05_too_many_tools_are_refused_on_every_route": "tools",
        "routes/test_route_fields.py::test_a_conversation_is_tokenized_as_asked": "add_special_tokens "
        "add_generation_prompt continue_final_message chat_template chat_template_kwargs",
        LLAMA_CPP + "test_texts_and_tokens_have_llama_cpps_forms": "content add_special parse_special with_pieces",
    },
    DetokenizeBody: {
        "routes/test_route_fields.py::test_an_unknown_model_is_404_on_every_route": "model",
        "http/test_edge.py::test_tokenize_and_detokenize_go_round": "tokens",
    },
    InputFields: {
        BAD_INPUTS: "normalize priority cache_salt request_id",
        EMBEDDINGS + "test_an_unknown_model_is_404": "model",
        EMBEDDINGS + "test_longer_inputs_are_refused_by_index_or_cut_where_asked": "truncate_prompt_tokens "
        "truncation_side",
        EMBEDDINGS + "test_special_tokens_are_added_unless_refused": "add_special_tokens",
        EMBEDDINGS + "test_dimensions_are_cut_and_normalised_again": "use_activation",
        EMBEDDINGS + "test_fields_of_messages_are_honoured_or_refused_by_name": "add_generation_prompt "
        "continue_final_message chat_template chat_template_kwargs",
    },
    ClassifyBody: {
        EMBEDDINGS + "test_a_conversation_is_one_input": "input messages",
        EMBEDDINGS + "test_prompts_of_the_checkpoint_stand_before_texts": "prompt_name",
    },
    EmbeddingBody: {
        EMBEDDINGS + "test_prompts_of_the_checkpoint_stand_before_texts": "input_type",
        EMBEDDINGS + "test_base64_bytes_and_numbers_are_the_same": "encoding_format embed_dtype",
        EMBEDDINGS + "test_dimensions_are_cut_and_normalised_again": "dimensions",
        BAD_INPUTS: "endianness",
    },
    VectorsBody: {EMBEDDINGS + "test_prompts_of_the_checkpoint_stand_before_texts": "task"},
    PoolingBody: {EMBEDDINGS + "test_tokens_one_by_one": "task"},
    ScoreBody: {
        "pooling/test_rerank.py::test_both_sides_go_by_four_names": "text_1 text_2 queries documents items data_1 "
        "data_2",
        "pooling/test_rerank.py::test_a_reranker_of_two_tokens_has_its_models_own_template": "instruction",
        "pooling/test_tokenwise.py::test_scores_by_tokens_are_sums_of_the_largest_products": "task",
    },
    RerankBody: {
        "pooling/test_rerank.py::test_documents_are_sorted_and_cut": "query documents top_n return_documents "
        "max_tokens_per_doc",
        "pooling/test_rerank.py::test_a_reranker_of_two_tokens_has_its_models_own_template": "instruction",
        "pooling/test_tokenwise.py::test_scores_by_tokens_are_sums_of_the_largest_products": "task",
    },
    DecidingBody: {
        DECISIONS + "test_any_model_name_is_taken": "model",
        DECISIONS + "test_a_long_state_is_computed_once_by_each_salt": "return_token_ids cache_salt",
        DECISIONS + "test_priorities_count_where_the_policy_looks_at_them": "priority",
    },
    SystemOneBody: {
        DECISIONS + "test_probabilities_are_the_softmax_of_transformers_logits": "questions",
        DECISIONS + "test_an_empty_state_and_a_state_beyond_the_context_are_refused": "state",
    },
    DecisionsBody: {DECISIONS + "test_openais_client_gets_the_same_probabilities": "input questions"},
    LabelScoreBody: {
        DECISIONS + "test_scores_of_labels_are_those_of_transformers": "query items label_token_ids apply_softmax "
        "item_first",
    },
    TeiFields: {
        VECTORS + "test_embed_gives_the_vectors_of_v1": "inputs prompt_name",
        VECTORS + "test_long_inputs_are_refused_or_cut_on_a_side": "truncate truncation_direction",
    },
    TeiEmbedBody: {VECTORS + "test_embed_gives_the_vectors_of_v1": "normalize dimensions"},
    TeiTokensBody: {},
    TeiPredictBody: {VECTORS + "test_classes_come_the_likeliest_first": "raw_scores"},
    SharedRerankBody: {
        VECTORS + "test_texts_are_ranked_with_the_scores_of_documents": "documents texts raw_scores return_text "
        "truncate truncation_direction",
    },
    CohereEmbedBody: {
        VECTORS + "test_coheres_client_gets_every_form": "model texts input_type embedding_types output_dimension",
        VECTORS + "test_cohere_embeds_images_and_mixed_inputs": "images inputs",
        VECTORS + "test_cohere_cuts_at_the_end_unless_asked_otherwise": "truncate max_tokens",
        VECTORS + "test_cohere_is_refused_by_its_own_names": "priority",
    },
    InvocationBody: {
        VECTORS + "test_an_invocation_is_the_route_that_its_fields_choose": "messages prompt input query items",
        VECTORS + "test_invocations_of_models_that_pool": "inputs",
    },
    LoadAdapterBody: {
        ADAPTERS + "test_loads_and_unloads_answer_in_vllms_words": "lora_name lora_path",
        ADAPTERS + "test_a_name_has_new_weights_only_after_a_load_in_place": "load_inplace",
        ADAPTERS + "test_s34_bad_loads_change_nothing": "sha256",
    },
    UnloadAdapterBody: {ADAPTERS + "test_loads_and_unloads_answer_in_vllms_words": "lora_name"},
    AbortBody: {"routes/test_chat.py::test_abort_requests_ends_an_answer": "request_ids"},
    GenerateBody: {
        RENDERED: "token_ids sampling_params output_mode request_id",
        "routes/test_tokens.py::test_fields_outside_the_sampling_params_have_effect": "model priority",
        "routes/test_tokens.py::test_a_stream_of_tokens_makes_the_whole_answer": "stream stream_options",
        "routes/test_tokens.py::test_pictures_are_found_by_hash_and_seen_again": "features",
        HASHES: "cache_salt",
        "routes/test_routed_experts.py::test_generate_takes_the_field_outside_sampling_params": "return_routed_experts",
    },
    TokenSampling: {RENDERED: "logprobs"},
    Features: {HASHES: "mm_hashes mm_placeholders"},
    Place: {HASHES: "offset length"},
    ollama.OllamaFunction: {
        OLLAMA + "test_its_client_gets_calls_and_returns_their_results": "name arguments",
    },
    ollama.OllamaCall: {
        OLLAMA + "test_a_wrong_message_is_named": "function",
        OLLAMA + "test_results_belong_to_calls_by_id_or_name_or_order": "id",
    },
    ollama.OllamaMessage: {
        OLLAMA + "test_a_wrong_message_is_named": "role images tool_calls",
        OLLAMA + "test_the_text_is_that_of_v1": "content",
        OLLAMA + "test_results_belong_to_calls_by_id_or_name_or_order": "tool_name tool_call_id thinking",
    },
    ollama.OllamaFields: {
        OLLAMA + "test_names_may_have_the_tag_latest": "model",
        OLLAMA + "test_the_text_is_that_of_v1": "stream options",
        OLLAMA + "test_the_answer_has_the_format": "format",
        REFUSED_HERE: "think",
        OLLAMA + "test_log_probabilities_are_those_of_chat": "logprobs top_logprobs",
        PROGRESS: "return_progress",
    },
    ollama.OllamaChatBody: {
        OLLAMA + "test_the_text_is_that_of_v1": "messages",
        OLLAMA + "test_its_client_gets_calls_and_returns_their_results": "tools",
    },
    ollama.OllamaGenerateBody: {
        OLLAMA + "test_the_text_is_that_of_v1": "prompt",
        OLLAMA + "test_a_system_text_precedes_the_prompt": "system",
        OLLAMA + "test_a_raw_prompt_is_continued_as_by_completions": "raw",
        REFUSED_HERE: "images template context",
        OLLAMA + "test_a_suffix_needs_tokens_for_it": "suffix",
    },
    llama_cpp.LlamaFields: {
        LLAMA_CPP + "test_wrong_bodies_are_refused_by_the_clients_names": "model n_probs",
        LLAMA_CPP + "test_the_text_is_that_of_v1": "n_predict stream temperature top_k top_p min_p seed stop "
        "repeat_penalty repeat_last_n presence_penalty frequency_penalty ignore_eos logit_bias grammar json_schema",
        LLAMA_CPP + "test_an_answer_has_llama_cpps_fields": "return_tokens",
        LLAMA_CPP + "test_fields_are_selected_by_path": "response_fields",
        PROGRESS: "return_progress",
    },
    llama_cpp.LlamaCompletionBody: {LLAMA_CPP + "test_prompts_have_many_forms": "prompt"},
    llama_cpp.LlamaEmbeddingBody: {
        LLAMA_CPP + "test_vectors_have_llama_cpps_form": "content embd_normalize model",
    },
    SglangBody: {
        SGLANG + "test_lists_of_prompts_have_their_own_options": "text input_ids sampling_params stream rid",
        SGLANG + "test_log_probabilities_are_those_of_completions": "return_logprob logprob_start_len top_logprobs_num "
        "return_text_in_logprobs",
        SGLANG + "test_given_tokens_have_log_probabilities_at_each_place": "token_ids_logprob",
        SGLANG + "test_a_picture_is_seen_where_its_placeholder_is": "image_data",
        SGLANG + "test_sounds_and_films_have_places_of_their_own": "audio_data video_data",
        SGLANG + "test_wrong_bodies_are_refused_by_the_clients_names": "lora_path model priority cache_salt "
        "return_routed_experts",
        PROGRESS: "return_progress",
    },
    SglangAbortBody: {SGLANG + "test_answers_are_ended_by_their_id": "rid abort_all"},
    llama_cpp.LlamaTemplateBody: {
        LLAMA_CPP
        + "test_a_conversation_is_rendered": "messages tools add_generation_prompt chat_template_kwargs model",
    },
    llama_cpp.LlamaFile: {
        LLAMA_CPP + "test_other_files_precede_the_gap_and_the_beginning_follows_it": "filename text",
    },
    llama_cpp.LlamaInfillBody: {
        LLAMA_CPP + "test_other_files_precede_the_gap_and_the_beginning_follows_it": "input_prefix input_suffix "
        "input_extra prompt",
        LLAMA_CPP + "test_an_answer_ends_with_a_line_when_its_time_is_over": "t_max_predict_ms",
    },
    ollama.OllamaShowBody: {OLLAMA + "test_names_may_have_the_tag_latest": "model name"},
    ollama.OllamaEmbedBody: {
        OLLAMA + "test_its_client_embeds": "truncate dimensions",
        OLLAMA + "test_bad_inputs_of_embeddings_are_named": "input model",
    },
    ollama.OllamaEmbeddingsBody: {OLLAMA + "test_bad_inputs_of_embeddings_are_named": "prompt model"},
}

# Accepted fields without effect, by the contract or until a later version: no test can fail when they are ignored.
NO_EFFECT: dict[type[msgspec.Struct], str] = {
    SamplingFields: "spaces_between_special_tokens",  # byte-level and piece tokenizers add no spaces
    MessagesBody: "metadata",
    DecisionsBody: "prompt_cache_key prompt_cache_options safety_identifier",
    GenerateBody: "kv_transfer_params",
    TranslationForm: "language",  # a chat model that takes audio detects the language
    llama_cpp.LlamaInfillBody: "samplers n_indent t_max_prompt_ms",  # llama.vim sends them to every server
    InputFields: "user padding",  # nothing is padded here
}
