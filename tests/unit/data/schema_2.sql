PRAGMA application_id = 1297239106;
PRAGMA user_version = 2;
CREATE TABLE groups (
    position INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('pending', 'in_flight', 'done', 'consumed')),
    consumed_step INTEGER CHECK ((consumed_step IS NOT NULL) = (state = 'consumed')),
    prompt_text TEXT NOT NULL,
    label TEXT,
    prompt_ids BLOB NOT NULL,
    metadata TEXT NOT NULL,
    updated_at REAL NOT NULL
);
CREATE INDEX groups_by_state ON groups (state, position);
CREATE TABLE samples (
    group_id TEXT NOT NULL REFERENCES groups (id),
    sample_index INTEGER NOT NULL,
    outcome TEXT CHECK (outcome IN ('scored', 'error', 'timeout')),
    reward REAL CHECK ((reward IS NOT NULL) = (outcome IS 'scored')),
    reward_message TEXT,
    reward_components TEXT,
    stop_reason TEXT NOT NULL CHECK (stop_reason IN ('stop', 'length', 'abort')),
    response_text TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    num_trainable_tokens INTEGER NOT NULL,
    min_version INTEGER,
    max_version INTEGER,
    response_ids BLOB,
    loss_mask BLOB,
    rollout_log_probs BLOB,
    weight_versions BLOB,
    metadata TEXT NOT NULL,
    routed_format TEXT CHECK (routed_experts IS NULL OR routed_format IS NOT NULL),
    routed_experts BLOB,
    PRIMARY KEY (group_id, sample_index)
);
