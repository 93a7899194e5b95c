// The C interface of Ballast: the same engine, configuration and report as <ballast/engine/engine.h>, for C and for
// whatever can call C.
// SPDX-License-Identifier: Apache-2.0
//
// Calls return a status; what is asked for comes through the last arguments, which a failed call leaves alone. Texts of
// failures are those of the C++ errors. A struct opens with its own size, which the caller sets: fields that a caller
// does not know keep their defaults, and so does what is zero. Memory that a call hands out belongs to the handle it
// came from; memory handed in need only live through the call, contexts of callbacks as long as they may be called.
// Threads, order of calls and lifetimes are those of C++: one thread at a time per engine; leases, passes and steps are
// closed before their engine. A close function accepts null.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BALLAST_API __attribute__((visibility("default")))
#else
#define BALLAST_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ballast_status {
  BALLAST_OK = 0,
  BALLAST_ERROR_CONFIG = 1,
  BALLAST_ERROR_PLAN = 2,
  BALLAST_ERROR_IO = 3,
  BALLAST_ERROR_CORRUPTION = 4,
  BALLAST_ERROR_COMMUNICATION = 5,
  BALLAST_ERROR_USAGE = 6,
  BALLAST_ERROR_OTHER = 7
} ballast_status;

/* The text of this thread's last failed call, valid until its next one; "" before any. */
BALLAST_API const char* ballast_last_error(void);

typedef struct ballast_config ballast_config;
typedef struct ballast_engine ballast_engine;
typedef struct ballast_stream ballast_stream; /* owned by its engine; never closed by hand */
typedef struct ballast_step ballast_step;
typedef struct ballast_pass ballast_pass;
typedef struct ballast_parameters ballast_parameters;
typedef struct ballast_gradients ballast_gradients;

/* ---- Configuration ---- */

BALLAST_API ballast_status ballast_config_create(ballast_config** config); /* the defaults */
BALLAST_API ballast_status ballast_config_from_file(const char* path, ballast_config** config);
/* name stands for the file in texts of errors; null: "configuration". */
BALLAST_API ballast_status ballast_config_from_json(const char* text, const char* name, ballast_config** config);
/* A dotted key and a value (JSON, or a string), such as "budget.host" and "512MiB". Where it fails, nothing changes. */
BALLAST_API ballast_status ballast_config_set(ballast_config* config, const char* key, const char* value);
/* Valid until the next call with this configuration. */
BALLAST_API ballast_status ballast_config_to_json(ballast_config* config, const char** json);
BALLAST_API ballast_status ballast_config_validate(const ballast_config* config);
BALLAST_API void ballast_config_close(ballast_config* config);

/* ---- Engine, before commit ---- */

typedef enum ballast_data_type {
  BALLAST_DEFAULT_TYPE = 0, /* precision.parameters */
  BALLAST_BF16 = 1,
  BALLAST_FP16 = 2,
  BALLAST_FP32 = 3
} ballast_data_type;

typedef enum ballast_log_level {
  BALLAST_LOG_DEBUG = 0,
  BALLAST_LOG_INFO = 1,
  BALLAST_LOG_WARNING = 2,
  BALLAST_LOG_ERROR = 3
} ballast_log_level;

typedef struct ballast_unit_id {
  uint32_t index;
} ballast_unit_id;
typedef struct ballast_parameter_id {
  uint32_t unit;
  uint32_t index; /* as registered within the unit */
} ballast_parameter_id;

typedef struct ballast_environment {
  size_t struct_size;
  void (*log)(void* context, ballast_log_level level, const char* text); /* one line, no newline; null: silence */
  void* log_context;
} ballast_environment;

typedef struct ballast_parameter_spec {
  size_t struct_size;
  const char* name;     /* unique within its unit */
  const int64_t* shape; /* row-major */
  size_t dimensions;    /* 0: a scalar */
  int group;
  ballast_data_type dtype;
  int frozen;      /* never updated, no optimizer states */
  int not_in_norm; /* another engine counts its gradient in the global norm (ParameterOptions::in_norm) */
} ballast_parameter_spec;

typedef struct ballast_expected_access {
  size_t struct_size;
  ballast_unit_id unit;
  int parameters; /* its parameters are acquired */
  int gradient;   /* a gradient is committed */
  int open_through;
} ballast_expected_access;

/* The configuration is copied; environment may be null. A device or communicators of the trainer's own need C++. */
BALLAST_API ballast_status ballast_engine_create(const ballast_config* config, const ballast_environment* environment,
                                                 ballast_engine** engine);
BALLAST_API void ballast_engine_close(ballast_engine* engine); /* drains; nothing is left in flight */
BALLAST_API ballast_status ballast_engine_add_unit(ballast_engine* engine, const char* name,
                                                   const ballast_parameter_spec* parameters, size_t count,
                                                   ballast_unit_id* unit);
BALLAST_API ballast_status ballast_engine_parameter(const ballast_engine* engine, ballast_unit_id unit,
                                                    const char* name, ballast_parameter_id* parameter);
BALLAST_API ballast_status ballast_engine_expect_order(ballast_engine* engine, const ballast_expected_access* accesses,
                                                       size_t count, int micro_batches);
BALLAST_API ballast_status ballast_engine_commit(ballast_engine* engine);

/* What to do where nvme.paths hold a committed run, or ballast_commit_options.checkpoints any. */
typedef enum ballast_existing_run {
  BALLAST_EXISTING_REFUSE = 0,   /* BALLAST_ERROR_CONFIG */
  BALLAST_EXISTING_RESUME = 1,   /* go on from the newest; where there is none, begin */
  BALLAST_EXISTING_OVERWRITE = 2 /* remove them */
} ballast_existing_run;

typedef struct ballast_commit_options {
  size_t struct_size;
  ballast_existing_run existing;
  const char* checkpoints; /* the folder that is saved to (resuming: or one checkpoint), seen by all; null: none */
} ballast_commit_options;

/* As ballast_engine_commit. Options may be null. */
BALLAST_API ballast_status ballast_engine_commit_with(ballast_engine* engine, const ballast_commit_options* options);

/* ---- Engine, after commit ---- */

/* The committed step or checkpoint that a run goes on from; user_bytes and path are valid while the engine is. */
typedef struct ballast_resumed_step {
  size_t struct_size;
  uint64_t step; /* optimizer steps taken */
  const void* user_bytes;
  size_t user_byte_count;
  const char* path;
} ballast_resumed_step;
/* *resumed: 0 where the run begins, and `from` is left alone; 1 where it goes on, and is not to be initialised. */
BALLAST_API ballast_status ballast_engine_resumed(const ballast_engine* engine, int* resumed,
                                                  ballast_resumed_step* from);
/* *committed: 0 without durable steps, and `step` is left alone; 1: `step` is the newest durable one. */
BALLAST_API ballast_status ballast_engine_committed_step(const ballast_engine* engine, int* committed, uint64_t* step);

/* Writes all of `values`. Another result than 0 ends the initialisation with BALLAST_ERROR_OTHER. */
typedef int (*ballast_fill)(void* context, ballast_parameter_id parameter, int64_t first_element, float* values,
                            size_t count);
BALLAST_API ballast_status ballast_engine_initialize(ballast_engine* engine, ballast_fill fill, void* context);

typedef struct ballast_group_rate {
  size_t struct_size;
  int group;
  double learning_rate;
  int has_weight_decay; /* 0: optimizer.weight_decay */
  double weight_decay;
} ballast_group_rate;

typedef struct ballast_step_options {
  size_t struct_size;
  int micro_batches;     /* 0: 1 */
  int has_learning_rate; /* 0: optimizer.learning_rate */
  double learning_rate;
  const ballast_group_rate* group_rates;
  size_t group_rate_count;
} ballast_step_options;

typedef enum ballast_pass_kind { BALLAST_TRAIN = 0, BALLAST_EVALUATE = 1 } ballast_pass_kind;

typedef struct ballast_pass_options {
  size_t struct_size;
  ballast_pass_kind kind;
  uint64_t key;      /* selects the trace (a sequence length, say) */
  int micro_batches; /* that this pass covers; 0: 1 */
} ballast_pass_options;

typedef struct ballast_gradient_norm {
  size_t struct_size;
  double value; /* NaN or infinity where not finite */
  int finite;
  double clip_factor;
  const char* non_finite_parameter; /* "unit/parameter" or ""; valid while the step is */
} ballast_gradient_norm;

typedef struct ballast_tensor {
  size_t struct_size;
  void* data; /* on the device */
  ballast_data_type dtype;
  const int64_t* shape;
  size_t dimensions;
  int64_t elements;
} ballast_tensor;

/* Options may be null. Evaluation between steps begins with ballast_engine_begin_pass. */
BALLAST_API ballast_status ballast_engine_begin_step(ballast_engine* engine, const ballast_step_options* options,
                                                     ballast_step** step);
BALLAST_API ballast_status ballast_engine_begin_pass(ballast_engine* engine, const ballast_pass_options* options,
                                                     ballast_pass** pass);
BALLAST_API ballast_status ballast_step_begin_pass(ballast_step* step, const ballast_pass_options* options,
                                                   ballast_pass** pass);
BALLAST_API ballast_status ballast_pass_end(ballast_pass* pass);
BALLAST_API void ballast_pass_close(ballast_pass* pass); /* ends it where the trainer did not */
BALLAST_API ballast_status ballast_step_loss_scale(const ballast_step* step, double* scale);
BALLAST_API ballast_status ballast_step_finish_backward(ballast_step* step, ballast_gradient_norm* norm);
/* Adds to *norm_squared what other engines have found, and sets *finite to 0 where it is 0 on any of them. Another
   result than 0 ends the call with BALLAST_ERROR_OTHER. */
typedef int (*ballast_add_others)(void* context, double* norm_squared, int* finite);
BALLAST_API ballast_status ballast_step_finish_backward_with(ballast_step* step, ballast_add_others add_others,
                                                             void* context, ballast_gradient_norm* norm);
BALLAST_API ballast_status ballast_step_update(ballast_step* step);
/* With durable steps the bytes are committed with the step and come back with it. */
BALLAST_API ballast_status ballast_step_update_with(ballast_step* step, const void* user_bytes, size_t count);
BALLAST_API ballast_status ballast_step_discard(ballast_step* step);
BALLAST_API void ballast_step_close(ballast_step* step); /* discards where it is not updated */

BALLAST_API ballast_status ballast_engine_acquire(ballast_engine* engine, ballast_unit_id unit, ballast_stream* stream,
                                                  ballast_parameters** parameters);
BALLAST_API ballast_status ballast_parameters_tensor(const ballast_parameters* parameters, ballast_parameter_id id,
                                                     ballast_tensor* tensor);
BALLAST_API ballast_status ballast_parameters_wait(ballast_parameters* parameters);
/* stream may be null: the one it was acquired on. */
BALLAST_API ballast_status ballast_parameters_release(ballast_parameters* parameters, ballast_stream* stream);
BALLAST_API void ballast_parameters_close(ballast_parameters* parameters); /* releases where the trainer did not */

BALLAST_API ballast_status ballast_engine_gradients(ballast_engine* engine, ballast_unit_id unit,
                                                    ballast_stream* stream, ballast_gradients** gradients);
BALLAST_API ballast_status ballast_gradients_tensor(const ballast_gradients* gradients, ballast_parameter_id id,
                                                    ballast_tensor* tensor);
BALLAST_API ballast_status ballast_gradients_absent(ballast_gradients* gradients, ballast_parameter_id id);
BALLAST_API ballast_status ballast_gradients_commit(ballast_gradients* gradients, ballast_stream* stream);
BALLAST_API ballast_status ballast_gradients_commit_partial(ballast_gradients* gradients, ballast_stream* stream);
BALLAST_API void ballast_gradients_close(ballast_gradients* gradients); /* discards where not committed */

BALLAST_API ballast_status ballast_engine_stream(ballast_engine* engine, ballast_stream** stream);
BALLAST_API ballast_status ballast_engine_make_stream(ballast_engine* engine, const char* name,
                                                      ballast_stream** stream);
/* Runs work(context) on the stream, in order; returns at once. No exception may leave it. */
BALLAST_API ballast_status ballast_stream_enqueue(ballast_stream* stream, void (*work)(void* context), void* context);
BALLAST_API ballast_status ballast_stream_synchronize(ballast_stream* stream);
BALLAST_API ballast_status ballast_stream_native_handle(const ballast_stream* stream, void** handle);

BALLAST_API ballast_status ballast_engine_settle(ballast_engine* engine);
BALLAST_API ballast_status ballast_engine_read(ballast_engine* engine, ballast_parameter_id id, int64_t first_element,
                                               float* values, size_t count);
BALLAST_API ballast_status ballast_engine_step_count(ballast_engine* engine, ballast_parameter_id id, uint64_t* count);
BALLAST_API ballast_status ballast_engine_read_moments(ballast_engine* engine, ballast_parameter_id id,
                                                       int64_t first_element, float* exp_avg, float* exp_avg_sq,
                                                       size_t count);
/* Between steps, on every rank. keep: of the step-N folders beside it that many stay, the newest (0: all). With durable
   steps it returns before it is written; finish_checkpoint waits for that, and returns what has kept it. */
BALLAST_API ballast_status ballast_engine_save_checkpoint(ballast_engine* engine, const char* path, size_t keep);
BALLAST_API ballast_status ballast_engine_finish_checkpoint(ballast_engine* engine);
BALLAST_API ballast_status ballast_engine_layout_generation(const ballast_engine* engine, uint64_t* generation);
BALLAST_API ballast_status ballast_engine_write_trace(const ballast_engine* engine, const char* path);
/* The effective configuration as JSON, valid until the next call of this function. */
BALLAST_API ballast_status ballast_engine_config_json(ballast_engine* engine, const char** json);

/* ---- Report ---- */

enum { BALLAST_LANE_COUNT = 7 }; /* NVMe read, NVMe write, host to device, device to host, collective, compute, CPU */

typedef struct ballast_lane_report {
  uint64_t bytes, busy_ns, tasks;
} ballast_lane_report;

typedef struct ballast_memory_range {
  const char* name;
  uint64_t bytes;
} ballast_memory_range;

typedef struct ballast_report {
  size_t struct_size;
  int64_t parameters;
  int world_size, rank, threads, zero_stage;
  const char *device, *timing, *placement, *io_backend, *io_backend_reason;
  double resident_fraction;
  uint64_t nvme_stored_bytes;
  ballast_lane_report lanes[7];
  uint64_t steps_updated, steps_discarded, acquires, acquires_prefetched, trace_repairs, acquire_wait_ns;
  uint64_t budget_device_bytes, budget_host_bytes, peak_device_bytes, peak_host_bytes;
  const ballast_memory_range* device_memory;
  size_t device_memory_count;
  const ballast_memory_range* host_memory;
  size_t host_memory_count;
  const char* const* nvme_files;
  size_t nvme_file_count;
  int at_rest; /* 1: nothing is under way, and nothing starts before the next call or the next work of a stream */
} ballast_report;

/* Its pointers are valid until the next report of this engine. */
BALLAST_API ballast_status ballast_engine_report(ballast_engine* engine, ballast_report* report);

#ifdef __cplusplus
}
#endif
