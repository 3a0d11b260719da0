// kvsnip: KV caches that keep the tokens that matter.
#pragma once

#include "kvsnip/attention.hpp"
#include "kvsnip/kv_cache.hpp"
#include "kvsnip/policy.hpp"
#include "kvsnip/policy/chain.hpp"
#include "kvsnip/policy/cur.hpp"
#include "kvsnip/policy/full.hpp"
#include "kvsnip/policy/keep_it_odd.hpp"
#include "kvsnip/policy/key_diff.hpp"
#include "kvsnip/policy/key_norm.hpp"
#include "kvsnip/policy/lag_kv.hpp"
#include "kvsnip/policy/q_filter.hpp"
#include "kvsnip/policy/random.hpp"
#include "kvsnip/policy/scissorhands.hpp"
#include "kvsnip/policy/snapkv.hpp"
#include "kvsnip/policy/streaming_llm.hpp"
#include "kvsnip/slot_planner.hpp"
