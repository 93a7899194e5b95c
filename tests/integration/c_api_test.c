/* A trainer in plain C over <ballast.h>: fits a line with its states on NVMe, and reads the texts of what is refused.
   c_api_errors.cc tells what C++ says. Ends with 0 where all holds.
   SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include <ballast.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kInputs = 16, kPoints = 64, kSteps = 60 };

/* The text that C++ throws for this JSON; "" where it throws none. */
const char* cpp_config_error(const char* json, const char* name);

static int failures = 0;

static void expect(int holds, const char* what, int line) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "c_api_test.c:%d: does not hold: %s; last error: \"%s\"\n", line, what, ballast_last_error());
}
#define EXPECT(condition) expect((condition) ? 1 : 0, #condition, __LINE__)
#define OK(call) EXPECT((call) == BALLAST_OK)

struct maths {
  const float *weight, *bias;
  float *weight_gradient, *bias_gradient;
  double loss;
};

static float input(int point, int j) { return sinf(0.37f * (float)(point * kInputs + j)); }

static void differentiate(void* context) {
  struct maths* m = context;
  m->loss = 0;
  *m->bias_gradient = 0;
  for (int j = 0; j < kInputs; ++j) m->weight_gradient[j] = 0;
  for (int point = 0; point < kPoints; ++point) {
    float error = *m->bias - 0.5f;
    for (int j = 0; j < kInputs; ++j) error += (m->weight[j] - 0.25f) * input(point, j);
    m->loss += (double)(error * error) / kPoints;
    *m->bias_gradient += 2 * error / kPoints;
    for (int j = 0; j < kInputs; ++j) m->weight_gradient[j] += 2 * error * input(point, j) / kPoints;
  }
}

static int zero(void* context, ballast_parameter_id parameter, int64_t first, float* values, size_t count) {
  (void)parameter;
  (void)first;
  for (size_t i = 0; i < count; ++i) values[i] = 0;
  ++*(int*)context;
  return 0;
}
static int refuse(void* context, ballast_parameter_id parameter, int64_t first, float* values, size_t count) {
  (void)zero(context, parameter, first, values, count);
  return 7;
}

static ballast_config* nvme_config(const char* folder) {
  ballast_config* config = NULL;
  OK(
      ballast_config_from_json("{\"placement\": {\"parameters\": \"nvme\", \"gradients\": \"host\", \"optimizer\": "
                               "\"nvme\"}, \"device\": \"host\", \"precision\": {\"parameters\": \"fp32\"}}",
                               NULL, &config));
  OK(ballast_config_set(config, "nvme.paths", folder));
  OK(ballast_config_set(config, "budget.device", "16MiB"));
  OK(ballast_config_set(config, "budget.host", "64MiB"));
  OK(ballast_config_set(config, "optimizer.learning_rate", "0.05"));
  OK(ballast_config_set(config, "optimizer.weight_decay", "0"));
  return config;
}

static ballast_unit_id add_line(ballast_engine* engine) {
  const int64_t weight_shape[] = {kInputs}, bias_shape[] = {1};
  const ballast_parameter_spec specs[] = {
      {.struct_size = sizeof specs[0], .name = "weight", .shape = weight_shape, .dimensions = 1},
      {.struct_size = sizeof specs[0], .name = "bias", .shape = bias_shape, .dimensions = 1}};
  ballast_unit_id unit = {99};
  OK(ballast_engine_add_unit(engine, "line", specs, 2, &unit));
  return unit;
}

/* What another engine has found: a squared norm of 900, all finite. */
static int add_900(void* context, double* norm_squared, int* finite) {
  if (*finite != 1 || *norm_squared < 0) return 5;
  *norm_squared += 900;
  ++*(int*)context;
  return 0;
}
static int refuse_to_add(void* context, double* norm_squared, int* finite) {
  (void)context;
  (void)norm_squared;
  (void)finite;
  return 5;
}

static void one_step(ballast_engine* engine, ballast_unit_id unit, ballast_parameter_id weight,
                     ballast_parameter_id bias, struct maths* m, int others) {
  ballast_stream* stream = NULL;
  ballast_step* step = NULL;
  ballast_pass* pass = NULL;
  ballast_parameters* parameters = NULL;
  ballast_gradients* gradients = NULL;
  ballast_tensor tensor = {.struct_size = sizeof tensor};
  ballast_gradient_norm norm = {.struct_size = sizeof norm};
  OK(ballast_engine_stream(engine, &stream));
  OK(ballast_engine_begin_step(engine, NULL, &step));
  OK(ballast_step_begin_pass(step, NULL, &pass));
  OK(ballast_engine_acquire(engine, unit, stream, &parameters));
  OK(ballast_engine_gradients(engine, unit, stream, &gradients));
  OK(ballast_parameters_tensor(parameters, weight, &tensor));
  EXPECT(tensor.elements == kInputs && tensor.dtype == BALLAST_FP32 && tensor.dimensions == 1);
  m->weight = tensor.data;
  OK(ballast_parameters_tensor(parameters, bias, &tensor));
  m->bias = tensor.data;
  OK(ballast_gradients_tensor(gradients, weight, &tensor));
  m->weight_gradient = tensor.data;
  OK(ballast_gradients_tensor(gradients, bias, &tensor));
  m->bias_gradient = tensor.data;
  if (failures > 0) exit(1); /* the maths would follow null pointers */
  OK(ballast_stream_enqueue(stream, differentiate, m));
  OK(ballast_gradients_commit(gradients, stream));
  OK(ballast_parameters_release(parameters, stream));
  ballast_gradients_close(gradients);
  ballast_parameters_close(parameters);
  OK(ballast_pass_end(pass));
  ballast_pass_close(pass);
  if (others) {
    int calls = 0;
    EXPECT(ballast_step_finish_backward_with(step, refuse_to_add, NULL, &norm) == BALLAST_ERROR_OTHER);
    EXPECT(strstr(ballast_last_error(), "returned 5") != NULL);
    EXPECT(ballast_step_finish_backward_with(step, NULL, NULL, &norm) == BALLAST_ERROR_USAGE);
    OK(ballast_step_finish_backward_with(step, add_900, &calls, &norm));
    EXPECT(calls == 1 && norm.value >= 30);
  } else {
    OK(ballast_step_finish_backward(step, &norm));
  }
  EXPECT(norm.finite == 1 && norm.value >= 0 && norm.non_finite_parameter[0] == '\0');
  EXPECT(ballast_step_update_with(step, NULL, 5) == BALLAST_ERROR_USAGE);
  OK(ballast_step_update_with(step, "abcd", 5));
  EXPECT(ballast_step_update(step) == BALLAST_ERROR_USAGE);
  ballast_step_close(step);
}

static void trains_from_nvme(const char* folder) {
  ballast_config* config = nvme_config(folder);
  ballast_engine* engine = NULL;
  ballast_parameter_id weight, bias;
  struct maths m = {0};
  int fills = 0;
  double first_loss = 0;
  uint64_t count = 0;
  float learnt = 0;
  ballast_report report = {.struct_size = sizeof report};
  OK(ballast_engine_create(config, NULL, &engine));
  ballast_config_close(config);
  if (engine == NULL) exit(1);
  const ballast_unit_id unit = add_line(engine);
  OK(ballast_engine_parameter(engine, unit, "weight", &weight));
  OK(ballast_engine_parameter(engine, unit, "bias", &bias));
  OK(ballast_engine_commit(engine));
  OK(ballast_engine_initialize(engine, zero, &fills));
  EXPECT(fills >= 2);
  for (int i = 0; i < kSteps; ++i) {
    one_step(engine, unit, weight, bias, &m, i == kSteps - 1);
    if (i == 0) first_loss = m.loss;
  }
  OK(ballast_engine_read(engine, bias, 0, &learnt, 1));
  OK(ballast_engine_step_count(engine, bias, &count));
  OK(ballast_engine_report(engine, &report));
  printf("loss %.6f -> %.6f, bias %.3f; %llu bytes read from NVMe by %s\n", first_loss, m.loss, (double)learnt,
         (unsigned long long)report.lanes[0].bytes, report.io_backend);
  EXPECT(m.loss < first_loss / 10);
  EXPECT(fabsf(learnt - 0.5f) < 0.2f);
  EXPECT(count == kSteps);
  EXPECT(report.parameters == kInputs + 1 && report.steps_updated == kSteps);
  EXPECT(report.lanes[0].bytes > 0 && report.lanes[1].bytes > 0 && report.nvme_stored_bytes > 0);
  EXPECT(strcmp(report.device, "host") == 0 && report.host_memory_count > 0);
  ballast_engine_close(engine);
}

/* A run of its own each time: commits `steps` steps over what is there, tells where it went on and what it learnt. */
static float durable_run(const char* folder, const ballast_commit_options* options, int steps, uint64_t from,
                         const char* checkpoint) {
  ballast_config* config = nvme_config(folder);
  OK(ballast_config_set(config, "durability", "step"));
  ballast_engine* engine = NULL;
  ballast_parameter_id weight, bias;
  struct maths m = {0};
  float learnt = 0;
  int resumed = -1, committed = -1, fills = 0;
  uint64_t step = 99;
  ballast_resumed_step at = {.struct_size = sizeof at};
  OK(ballast_engine_create(config, NULL, &engine));
  ballast_config_close(config);
  if (engine == NULL) exit(1);
  const ballast_unit_id unit = add_line(engine);
  OK(ballast_engine_parameter(engine, unit, "weight", &weight));
  OK(ballast_engine_parameter(engine, unit, "bias", &bias));
  OK(ballast_engine_commit_with(engine, options));
  OK(ballast_engine_resumed(engine, &resumed, &at));
  EXPECT(resumed == (from > 0));
  if (resumed == 0) {
    OK(ballast_engine_initialize(engine, zero, &fills));
  } else {
    EXPECT(at.step == from && at.path != NULL);
    EXPECT(at.user_byte_count == 5 && memcmp(at.user_bytes, "abcd", 5) == 0);
  }
  for (int i = 0; i < steps; ++i) one_step(engine, unit, weight, bias, &m, 0);
  OK(ballast_engine_settle(engine));
  OK(ballast_engine_committed_step(engine, &committed, &step));
  EXPECT(committed == 1 && step == from + (uint64_t)steps);
  OK(ballast_engine_read(engine, weight, 3, &learnt, 1));
  if (checkpoint != NULL) OK(ballast_engine_save_checkpoint(engine, checkpoint, 0));
  ballast_engine_close(engine);
  return learnt;
}

static void resumes_where_it_was_committed(const char* folder) {
  char here[64], saved[64], command[256];
  snprintf(here, sizeof here, "%s/run", folder);
  snprintf(saved, sizeof saved, "%s/saved", folder);
  const ballast_commit_options overwrite = {sizeof overwrite, BALLAST_EXISTING_OVERWRITE, NULL};
  const ballast_commit_options resume = {sizeof resume, BALLAST_EXISTING_RESUME, NULL};
  const ballast_commit_options load = {sizeof load, BALLAST_EXISTING_RESUME, saved};
  const float whole = durable_run(here, NULL, 6, 0, NULL);
  (void)durable_run(here, &overwrite, 4, 0, saved);
  EXPECT(durable_run(here, &resume, 2, 4, NULL) == whole);
  /* A run that is there is not taken, nor what is no choice. */
  ballast_config* config = nvme_config(here);
  OK(ballast_config_set(config, "durability", "step"));
  ballast_engine* engine = NULL;
  OK(ballast_engine_create(config, NULL, &engine));
  ballast_config_close(config);
  if (engine == NULL) exit(1);
  (void)add_line(engine);
  const ballast_commit_options neither = {sizeof neither, (ballast_existing_run)3, NULL};
  EXPECT(ballast_engine_commit_with(engine, &neither) == BALLAST_ERROR_USAGE);
  EXPECT(ballast_engine_commit(engine) == BALLAST_ERROR_CONFIG);
  ballast_engine_close(engine);
  snprintf(command, sizeof command, "rm -r %s", here);
  EXPECT(system(command) == 0);
  EXPECT(durable_run(here, &load, 2, 4, NULL) == whole);
  snprintf(command, sizeof command, "rm -r %s %s", here, saved);
  EXPECT(system(command) == 0);
}

static void refuses_with_the_same_texts(const char* folder) {
  const char* wrong[] = {"{\"budgett\": 1}", "{\"zero_stage\": 9}", "{", "{\"nvme\": {\"queue_depth\": -1}}"};
  ballast_config* config = NULL;
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    EXPECT(ballast_config_from_json(wrong[i], "some.json", &config) == BALLAST_ERROR_CONFIG);
    EXPECT(config == NULL);
    EXPECT(ballast_last_error()[0] != '\0');
    EXPECT(strcmp(ballast_last_error(), cpp_config_error(wrong[i], "some.json")) == 0);
  }
  EXPECT(ballast_config_from_file(NULL, &config) == BALLAST_ERROR_USAGE);
  EXPECT(strstr(ballast_last_error(), "path is null") != NULL);
  EXPECT(ballast_engine_commit(NULL) == BALLAST_ERROR_USAGE);

  config = nvme_config(folder);
  const char* before = NULL;
  OK(ballast_config_to_json(config, &before));
  char* kept = strdup(before);
  EXPECT(ballast_config_set(config, "budget.hots", "1GiB") == BALLAST_ERROR_CONFIG);
  OK(ballast_config_to_json(config, &before));
  EXPECT(kept != NULL && strcmp(kept, before) == 0);
  free(kept);

  ballast_engine* engine = NULL;
  OK(ballast_engine_create(config, NULL, &engine));
  ballast_config_close(config);
  if (engine == NULL) exit(1);
  const ballast_unit_id unit = add_line(engine);
  ballast_parameter_id id;
  ballast_report report = {.struct_size = 0};
  int fills = 0;
  EXPECT(ballast_engine_parameter(engine, unit, "wieght", &id) == BALLAST_ERROR_USAGE);
  ballast_parameter_spec unsized = {.name = "x"};
  ballast_unit_id other;
  EXPECT(ballast_engine_add_unit(engine, "x", &unsized, 1, &other) == BALLAST_ERROR_USAGE);
  EXPECT(strstr(ballast_last_error(), "struct_size") != NULL);
  EXPECT(ballast_engine_report(engine, &report) == BALLAST_ERROR_USAGE);
  /* A newer caller: what this build does not know must be zero. */
  struct {
    ballast_environment known;
    uint64_t unknown;
  } newer = {{sizeof newer, NULL, NULL}, 1};
  ballast_config* defaults = NULL;
  ballast_engine* none = NULL;
  OK(ballast_config_create(&defaults));
  EXPECT(ballast_engine_create(defaults, &newer.known, &none) == BALLAST_ERROR_USAGE);
  EXPECT(none == NULL);
  ballast_config_close(defaults);
  OK(ballast_engine_commit(engine));
  EXPECT(ballast_engine_initialize(engine, refuse, &fills) == BALLAST_ERROR_OTHER);
  EXPECT(strstr(ballast_last_error(), "returned 7") != NULL);
  ballast_engine_close(engine);
}

int main(void) {
  char folder[] = "/tmp/ballast_c_api_XXXXXX";
  EXPECT(ballast_last_error()[0] == '\0');
  if (mkdtemp(folder) == NULL) {
    perror("mkdtemp");
    return 1;
  }
  trains_from_nvme(folder);
  resumes_where_it_was_committed(folder);
  refuses_with_the_same_texts(folder);
  EXPECT(rmdir(folder) == 0); /* the engine leaves nothing behind */
  return failures == 0 ? 0 : 1;
}
