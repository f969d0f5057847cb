"""POST routes of vLLM versions that are not installed here, read from the decorators in their sources. Knows no app."""

_TEXTS = {
    "0.26.0": """
        /abort_requests /classify /collective_rpc /detokenize /finish_weight_update /generative_scoring
        /inference/v1/generate /init_weight_transfer_engine /invocations /is_scaling_elastic_ep /pause /ping /pooling
        /rerank /reset_encoder_cache /reset_mm_cache /reset_prefix_cache /resume /scale_elastic_ep /score /sleep
        /start_draft_weight_update /start_profile /start_weight_update /stop_profile /tokenize /update_weights
        /v1/audio/transcriptions /v1/audio/translations /v1/chat/completions /v1/chat/completions/batch
        /v1/chat/completions/derender /v1/chat/completions/render /v1/completions /v1/completions/derender
        /v1/completions/render /v1/embeddings /v1/load_lora_adapter /v1/messages /v1/messages/count_tokens /v1/rerank
        /v1/responses /v1/responses/{response_id}/cancel /v1/score /v1/unload_lora_adapter /v2/embed /v2/rerank
        /wake_up
    """,
    "0.33.0": """
        /abort_requests /classify /cohere/v2/chat /cohere/v2/chat/render /collective_rpc /detokenize
        /fault_tolerance/apply /finish_weight_update /generative_scoring /inference/v1/abort_requests
        /inference/v1/generate /init_weight_transfer_engine /invocations /is_scaling_elastic_ep /pause /ping /pooling
        /release_kv_cache_memory /rerank /reset_encoder_cache /reset_mm_cache /reset_prefix_cache /resume
        /scale_elastic_ep /score /shutdown_weight_transfer_engine /sleep /start_draft_weight_update /start_profile
        /start_weight_update /stop_profile /tokenize /update_weight_version /update_weights /v1/audio/transcriptions
        /v1/audio/translations /v1/chat/completions /v1/chat/completions/batch /v1/chat/completions/derender
        /v1/chat/completions/render /v1/completions /v1/completions/derender /v1/completions/render /v1/decisions
        /v1/embeddings /v1/load_lora_adapter /v1/messages /v1/messages/count_tokens /v1/messages/render /v1/rerank
        /v1/responses /v1/responses/render /v1/responses/{response_id}/cancel /v1/score /v1/systemone
        /v1/unload_lora_adapter /v2/embed /v2/rerank /wake_up /weight_checker
    """,
}
POST = {version: text.split() for version, text in _TEXTS.items()}
