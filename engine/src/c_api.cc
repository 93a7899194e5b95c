// The C interface over the C++ one: handles hold the C++ objects, and no exception crosses.
// SPDX-License-Identifier: Apache-2.0
#include <ballast.h>
#include <ballast/engine/engine.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

using namespace ballast;

struct ballast_config {
  Config value;
  std::string json = {};
};
struct ballast_stream {
  Stream value;
};
struct ballast_engine {
  Engine value;
  std::deque<ballast_stream> streams = {};  // addresses stay
  ballast_stream* own_stream = nullptr;
  Report report = {};
  std::vector<ballast_memory_range> device_memory = {}, host_memory = {};
  std::vector<const char*> nvme_files = {};
  std::string json = {};
};
struct ballast_step {
  Step value;
  std::string non_finite_parameter = {};
};
struct ballast_pass {
  PassScope value;
};
struct ballast_parameters {
  ParameterLease value;
};
struct ballast_gradients {
  GradientLease value;
};

namespace {

thread_local std::string last_error;
thread_local bool last_error_lost = false;  // no memory to keep the text

ballast_status fail(ballast_status status, const char* text) noexcept {
  try {
    last_error = text;
    last_error_lost = false;
  } catch (...) {
    last_error_lost = true;
  }
  return status;
}

template <typename Call>
ballast_status guarded(Call&& call) noexcept {
  try {
    std::forward<Call>(call)();
    return BALLAST_OK;
  } catch (const ConfigError& error) {
    return fail(BALLAST_ERROR_CONFIG, error.what());
  } catch (const PlanError& error) {
    return fail(BALLAST_ERROR_PLAN, error.what());
  } catch (const IoError& error) {
    return fail(BALLAST_ERROR_IO, error.what());
  } catch (const CorruptionError& error) {
    return fail(BALLAST_ERROR_CORRUPTION, error.what());
  } catch (const CommunicationError& error) {
    return fail(BALLAST_ERROR_COMMUNICATION, error.what());
  } catch (const UsageError& error) {
    return fail(BALLAST_ERROR_USAGE, error.what());
  } catch (const std::bad_alloc&) {
    return fail(BALLAST_ERROR_OTHER, "out of memory");
  } catch (const std::exception& error) {
    return fail(BALLAST_ERROR_OTHER, error.what());
  } catch (...) {
    return fail(BALLAST_ERROR_OTHER, "an exception of an unknown type");
  }
}

// *pointer, or a UsageError that names what is null.
template <typename T>
T& given(T* pointer, const char* what) {
  if (pointer == nullptr) throw UsageError(std::string("C interface: ") + what + " is null");
  return *pointer;
}

void check_size(std::size_t size, const char* what) {
  constexpr std::size_t kLargest = 4096;  // more is no size of a struct of ours, now or later
  if (size < sizeof(std::size_t) || size > kLargest)
    throw UsageError(std::string("C interface: struct_size of ") + what + " is " + std::to_string(size) +
                     "; set it to sizeof the struct");
}

// The caller's struct as this build knows it: what an older caller's lacks is zero; what a newer one's has in excess
// must be zero.
template <typename T>
T taken(const T* from, const char* what) {
  const std::size_t size = given(from, what).struct_size;
  check_size(size, what);
  T out = {};
  std::memcpy(&out, from, std::min(size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  if (size > sizeof(T) && std::any_of(bytes + sizeof(T), bytes + size, [](unsigned char byte) { return byte != 0; }))
    throw UsageError(std::string("C interface: ") + what +
                     " asks for what this build does not know; set only the first " + std::to_string(sizeof(T)) +
                     " bytes");
  return out;
}

template <typename T>
std::vector<T> taken_array(const T* from, std::size_t count, const char* what) {
  std::vector<T> out;
  if (count == 0) return out;
  const std::size_t stride = given(from, what).struct_size;
  check_size(stride, what);
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (std::size_t i = 0; i < count; ++i) {
    out.push_back(taken(reinterpret_cast<const T*>(bytes + i * stride), what));
    if (out.back().struct_size != stride)
      throw UsageError(std::string("C interface: struct_size differs within the array of ") + what);
  }
  return out;
}

// Copies what the caller's struct has room for; its struct_size stays.
template <typename T>
void hand_out(T value, T* to) {
  value.struct_size = to->struct_size;
  std::memcpy(static_cast<void*>(to), &value, std::min(to->struct_size, sizeof(T)));
}

DataType data_type(ballast_data_type type) {
  switch (type) {
    case BALLAST_BF16:
      return DataType::bf16;
    case BALLAST_FP16:
      return DataType::fp16;
    case BALLAST_FP32:
      return DataType::fp32;
    default:
      throw UsageError("C interface: dtype " + std::to_string(static_cast<int>(type)) +
                       " is none of ballast_data_type");
  }
}

ballast_data_type data_type(DataType type) {
  return type == DataType::bf16 ? BALLAST_BF16 : type == DataType::fp16 ? BALLAST_FP16 : BALLAST_FP32;
}

PassOptions pass_options(const ballast_pass_options* options) {
  if (options == nullptr) return {};
  const auto in = taken(options, "pass options");
  if (in.kind != BALLAST_TRAIN && in.kind != BALLAST_EVALUATE)
    throw UsageError("C interface: pass kind " + std::to_string(static_cast<int>(in.kind)) +
                     " is neither BALLAST_TRAIN nor BALLAST_EVALUATE");
  return {.kind = in.kind == BALLAST_TRAIN ? Pass::train : Pass::evaluate,
          .key = in.key,
          .micro_batches = in.micro_batches == 0 ? 1 : in.micro_batches};
}

StepOptions step_options(const ballast_step_options* options) {
  StepOptions out;
  if (options == nullptr) return out;
  const auto in = taken(options, "step options");
  if (in.micro_batches != 0) out.micro_batches = in.micro_batches;
  if (in.has_learning_rate != 0) out.learning_rate = in.learning_rate;
  for (const auto& rate : taken_array(in.group_rates, in.group_rate_count, "group rate")) {
    GroupRate group{.group = rate.group, .learning_rate = rate.learning_rate};
    if (rate.has_weight_decay != 0) group.weight_decay = rate.weight_decay;
    out.group_rates.push_back(group);
  }
  return out;
}

CommitOptions commit_options(const ballast_commit_options* options) {
  CommitOptions out;
  if (options == nullptr) return out;
  const auto in = taken(options, "commit options");
  switch (in.existing) {
    case BALLAST_EXISTING_REFUSE:
      break;
    case BALLAST_EXISTING_RESUME:
      out.existing = ExistingRun::resume;
      break;
    case BALLAST_EXISTING_OVERWRITE:
      out.existing = ExistingRun::overwrite;
      break;
    default:
      throw UsageError("C interface: existing " + std::to_string(static_cast<int>(in.existing)) +
                       " is none of ballast_existing_run");
  }
  if (in.checkpoints != nullptr) out.checkpoints = in.checkpoints;
  return out;
}

void hand_out(const Tensor& tensor, ballast_tensor* to) {
  check_size(given(to, "tensor").struct_size, "tensor");
  hand_out(ballast_tensor{.struct_size = 0,
                          .data = tensor.data,
                          .dtype = data_type(tensor.dtype),
                          .shape = tensor.shape.data(),
                          .dimensions = tensor.shape.size(),
                          .elements = tensor.elements},
           to);
}

void finish_backward(ballast_step* step, const AddOthers& add_others, ballast_gradient_norm* norm) {
  check_size(given(norm, "norm").struct_size, "gradient norm");
  GradientNorm result = given(step, "step").value.finish_backward(add_others);
  step->non_finite_parameter = std::move(result.non_finite_parameter);
  hand_out(ballast_gradient_norm{.struct_size = 0,
                                 .value = result.value,
                                 .finite = result.finite ? 1 : 0,
                                 .clip_factor = result.clip_factor,
                                 .non_finite_parameter = step->non_finite_parameter.c_str()},
           norm);
}

ParameterId id_of(ballast_parameter_id id) { return {id.unit, id.index}; }

std::span<float> values_of(float* values, std::size_t count) {
  if (count != 0) given(values, "values");
  return {values, count};
}

std::vector<ballast_memory_range> ranges_of(const std::vector<MemoryRange>& ranges) {
  std::vector<ballast_memory_range> out;
  for (const MemoryRange& range : ranges) out.push_back({range.name.c_str(), range.bytes});
  return out;
}

}  // namespace

const char* ballast_last_error(void) { return last_error_lost ? "out of memory" : last_error.c_str(); }

ballast_status ballast_config_create(ballast_config** config) {
  return guarded([&] { given(config, "config") = new ballast_config{Config{}}; });
}
ballast_status ballast_config_from_file(const char* path, ballast_config** config) {
  return guarded([&] { given(config, "config") = new ballast_config{Config::from_file(&given(path, "path"))}; });
}
ballast_status ballast_config_from_json(const char* text, const char* name, ballast_config** config) {
  return guarded([&] {
    given(config, "config") =
        new ballast_config{Config::from_json(&given(text, "text"), name == nullptr ? "configuration" : name)};
  });
}
ballast_status ballast_config_set(ballast_config* config, const char* key, const char* value) {
  return guarded([&] {
    Config& old = given(config, "config").value;
    old = Config::from_json(old.to_json(), "configuration", {{&given(key, "key"), &given(value, "value")}});
  });
}
ballast_status ballast_config_to_json(ballast_config* config, const char** json) {
  return guarded([&] {
    given(json, "json");
    given(config, "config").json = config->value.to_json();
    *json = config->json.c_str();
  });
}
ballast_status ballast_config_validate(const ballast_config* config) {
  return guarded([&] { given(config, "config").value.validate(); });
}
void ballast_config_close(ballast_config* config) { delete config; }

ballast_status ballast_engine_create(const ballast_config* config, const ballast_environment* environment,
                                     ballast_engine** engine) {
  return guarded([&] {
    given(engine, "engine");
    EngineEnvironment world;
    if (environment != nullptr) {
      const auto in = taken(environment, "environment");
      if (in.log != nullptr)
        world.log = [in](LogLevel level, std::string_view text) {
          in.log(in.log_context, static_cast<ballast_log_level>(level), std::string(text).c_str());
        };
    }
    *engine = new ballast_engine{Engine(given(config, "config").value, std::move(world))};
  });
}
void ballast_engine_close(ballast_engine* engine) { delete engine; }

ballast_status ballast_engine_add_unit(ballast_engine* engine, const char* name,
                                       const ballast_parameter_spec* parameters, size_t count, ballast_unit_id* unit) {
  return guarded([&] {
    given(unit, "unit");
    std::vector<ParameterSpec> specs;
    for (const auto& in : taken_array(parameters, count, "parameter spec")) {
      ParameterSpec spec{.name = &given(in.name, "name of a parameter"), .shape = {}};
      if (in.dimensions != 0) {
        const std::int64_t* shape = &given(in.shape, "shape");
        spec.shape.assign(shape, shape + in.dimensions);
      }
      spec.options.group = in.group;
      if (in.dtype != BALLAST_DEFAULT_TYPE) spec.options.dtype = data_type(in.dtype);
      spec.options.trainable = in.frozen == 0;
      spec.options.in_norm = in.not_in_norm == 0;
      specs.push_back(std::move(spec));
    }
    *unit = {given(engine, "engine").value.add_unit(&given(name, "name"), std::move(specs)).index};
  });
}
ballast_status ballast_engine_parameter(const ballast_engine* engine, ballast_unit_id unit, const char* name,
                                        ballast_parameter_id* parameter) {
  return guarded([&] {
    given(parameter, "parameter");
    const ParameterId id = given(engine, "engine").value.parameter({unit.index}, &given(name, "name"));
    *parameter = {id.unit, id.index};
  });
}
ballast_status ballast_engine_expect_order(ballast_engine* engine, const ballast_expected_access* accesses,
                                           size_t count, int micro_batches) {
  return guarded([&] {
    std::vector<ExpectedAccess> order;
    for (const auto& in : taken_array(accesses, count, "expected access"))
      order.push_back({.unit = {in.unit.index},
                       .parameters = in.parameters != 0,
                       .gradient = in.gradient != 0,
                       .open_through = in.open_through});
    given(engine, "engine").value.expect_order(std::move(order), micro_batches == 0 ? 1 : micro_batches);
  });
}
ballast_status ballast_engine_commit(ballast_engine* engine) { return ballast_engine_commit_with(engine, nullptr); }
ballast_status ballast_engine_commit_with(ballast_engine* engine, const ballast_commit_options* options) {
  return guarded([&] { given(engine, "engine").value.commit(commit_options(options)); });
}
ballast_status ballast_engine_resumed(const ballast_engine* engine, int* resumed, ballast_resumed_step* from) {
  return guarded([&] {
    check_size(given(from, "from").struct_size, "resumed step");
    const auto& step = given(engine, "engine").value.resumed();
    given(resumed, "resumed") = step ? 1 : 0;
    if (!step) return;
    hand_out(ballast_resumed_step{.struct_size = 0,
                                  .step = step->step,
                                  .user_bytes = step->user_bytes.data(),
                                  .user_byte_count = step->user_bytes.size(),
                                  .path = step->path.c_str()},
             from);
  });
}
ballast_status ballast_engine_committed_step(const ballast_engine* engine, int* committed, uint64_t* step) {
  return guarded([&] {
    given(step, "step");
    const std::optional<std::uint64_t> newest = given(engine, "engine").value.committed_step();
    given(committed, "committed") = newest ? 1 : 0;
    if (newest) *step = *newest;
  });
}

ballast_status ballast_engine_initialize(ballast_engine* engine, ballast_fill fill, void* context) {
  return guarded([&] {
    given(fill, "fill");
    given(engine, "engine").value.initialize([&](ParameterId id, std::int64_t first, std::span<float> values) {
      const int result = fill(context, {id.unit, id.index}, first, values.data(), values.size());
      if (result != 0) throw Error("C interface: the fill callback returned " + std::to_string(result));
    });
  });
}
ballast_status ballast_engine_begin_step(ballast_engine* engine, const ballast_step_options* options,
                                         ballast_step** step) {
  return guarded([&] {
    given(step, "step");
    *step = new ballast_step{given(engine, "engine").value.begin_step(step_options(options))};
  });
}
ballast_status ballast_engine_begin_pass(ballast_engine* engine, const ballast_pass_options* options,
                                         ballast_pass** pass) {
  return guarded([&] {
    given(pass, "pass");
    *pass = new ballast_pass{given(engine, "engine").value.begin_pass(pass_options(options))};
  });
}
ballast_status ballast_step_begin_pass(ballast_step* step, const ballast_pass_options* options, ballast_pass** pass) {
  return guarded([&] {
    given(pass, "pass");
    *pass = new ballast_pass{given(step, "step").value.begin_pass(pass_options(options))};
  });
}
ballast_status ballast_pass_end(ballast_pass* pass) {
  return guarded([&] { given(pass, "pass").value.end(); });
}
void ballast_pass_close(ballast_pass* pass) { delete pass; }
ballast_status ballast_step_loss_scale(const ballast_step* step, double* scale) {
  return guarded([&] { given(scale, "scale") = given(step, "step").value.loss_scale(); });
}
ballast_status ballast_step_finish_backward(ballast_step* step, ballast_gradient_norm* norm) {
  return guarded([&] { finish_backward(step, {}, norm); });
}
ballast_status ballast_step_finish_backward_with(ballast_step* step, ballast_add_others add_others, void* context,
                                                 ballast_gradient_norm* norm) {
  return guarded([&] {
    given(add_others, "add_others");
    const auto add = [&](GradientTotal& total) {
      int finite = total.finite ? 1 : 0;
      const int result = add_others(context, &total.norm_squared, &finite);
      if (result != 0) throw Error("C interface: the add_others callback returned " + std::to_string(result));
      total.finite = finite != 0;
    };
    finish_backward(step, add, norm);
  });
}
ballast_status ballast_step_update(ballast_step* step) { return ballast_step_update_with(step, nullptr, 0); }
ballast_status ballast_step_update_with(ballast_step* step, const void* user_bytes, size_t count) {
  return guarded([&] {
    const auto* bytes = static_cast<const std::byte*>(user_bytes);
    if (count != 0) given(bytes, "user_bytes");
    given(step, "step").value.update({bytes, count});
  });
}
ballast_status ballast_step_discard(ballast_step* step) {
  return guarded([&] { given(step, "step").value.discard(); });
}
void ballast_step_close(ballast_step* step) { delete step; }

ballast_status ballast_engine_acquire(ballast_engine* engine, ballast_unit_id unit, ballast_stream* stream,
                                      ballast_parameters** parameters) {
  return guarded([&] {
    given(parameters, "parameters");
    *parameters =
        new ballast_parameters{given(engine, "engine").value.acquire({unit.index}, given(stream, "stream").value)};
  });
}
ballast_status ballast_parameters_tensor(const ballast_parameters* parameters, ballast_parameter_id id,
                                         ballast_tensor* tensor) {
  return guarded([&] { hand_out(given(parameters, "parameters").value[id_of(id)], tensor); });
}
ballast_status ballast_parameters_wait(ballast_parameters* parameters) {
  return guarded([&] { given(parameters, "parameters").value.wait(); });
}
ballast_status ballast_parameters_release(ballast_parameters* parameters, ballast_stream* stream) {
  return guarded([&] {
    ParameterLease& lease = given(parameters, "parameters").value;
    stream == nullptr ? lease.release() : lease.release(stream->value);
  });
}
void ballast_parameters_close(ballast_parameters* parameters) { delete parameters; }

ballast_status ballast_engine_gradients(ballast_engine* engine, ballast_unit_id unit, ballast_stream* stream,
                                        ballast_gradients** gradients) {
  return guarded([&] {
    given(gradients, "gradients");
    *gradients =
        new ballast_gradients{given(engine, "engine").value.gradients({unit.index}, given(stream, "stream").value)};
  });
}
ballast_status ballast_gradients_tensor(const ballast_gradients* gradients, ballast_parameter_id id,
                                        ballast_tensor* tensor) {
  return guarded([&] { hand_out(given(gradients, "gradients").value[id_of(id)], tensor); });
}
ballast_status ballast_gradients_absent(ballast_gradients* gradients, ballast_parameter_id id) {
  return guarded([&] { given(gradients, "gradients").value.absent(id_of(id)); });
}
ballast_status ballast_gradients_commit(ballast_gradients* gradients, ballast_stream* stream) {
  return guarded([&] { given(gradients, "gradients").value.commit(given(stream, "stream").value); });
}
ballast_status ballast_gradients_commit_partial(ballast_gradients* gradients, ballast_stream* stream) {
  return guarded([&] { given(gradients, "gradients").value.commit_partial(given(stream, "stream").value); });
}
void ballast_gradients_close(ballast_gradients* gradients) { delete gradients; }

ballast_status ballast_engine_stream(ballast_engine* engine, ballast_stream** stream) {
  return guarded([&] {
    given(stream, "stream");
    if (given(engine, "engine").own_stream == nullptr)
      engine->own_stream = &engine->streams.emplace_back(ballast_stream{engine->value.stream()});
    *stream = engine->own_stream;
  });
}
ballast_status ballast_engine_make_stream(ballast_engine* engine, const char* name, ballast_stream** stream) {
  return guarded([&] {
    given(stream, "stream");
    const Stream made = given(engine, "engine").value.make_stream(&given(name, "name"));
    *stream = &engine->streams.emplace_back(ballast_stream{made});
  });
}
ballast_status ballast_stream_enqueue(ballast_stream* stream, void (*work)(void* context), void* context) {
  return guarded([&] {
    given(work, "work");
    given(stream, "stream").value.enqueue([work, context] { work(context); });
  });
}
ballast_status ballast_stream_synchronize(ballast_stream* stream) {
  return guarded([&] { given(stream, "stream").value.synchronize(); });
}
ballast_status ballast_stream_native_handle(const ballast_stream* stream, void** handle) {
  return guarded([&] { given(handle, "handle") = given(stream, "stream").value.native_handle(); });
}

ballast_status ballast_engine_settle(ballast_engine* engine) {
  return guarded([&] { given(engine, "engine").value.settle(); });
}
ballast_status ballast_engine_read(ballast_engine* engine, ballast_parameter_id id, int64_t first_element,
                                   float* values, size_t count) {
  return guarded([&] { given(engine, "engine").value.read(id_of(id), first_element, values_of(values, count)); });
}
ballast_status ballast_engine_step_count(ballast_engine* engine, ballast_parameter_id id, uint64_t* count) {
  return guarded([&] { given(count, "count") = given(engine, "engine").value.step_count(id_of(id)); });
}
ballast_status ballast_engine_read_moments(ballast_engine* engine, ballast_parameter_id id, int64_t first_element,
                                           float* exp_avg, float* exp_avg_sq, size_t count) {
  return guarded([&] {
    given(engine, "engine")
        .value.read_moments(id_of(id), first_element, values_of(exp_avg, count), values_of(exp_avg_sq, count));
  });
}
ballast_status ballast_engine_finish_checkpoint(ballast_engine* engine) {
  return guarded([&] { given(engine, "engine").value.finish_checkpoint(); });
}

ballast_status ballast_engine_save_checkpoint(ballast_engine* engine, const char* path, size_t keep) {
  return guarded([&] { given(engine, "engine").value.save_checkpoint(&given(path, "path"), keep); });
}
ballast_status ballast_engine_layout_generation(const ballast_engine* engine, uint64_t* generation) {
  return guarded([&] { given(generation, "generation") = given(engine, "engine").value.layout_generation(); });
}
ballast_status ballast_engine_write_trace(const ballast_engine* engine, const char* path) {
  return guarded([&] { given(engine, "engine").value.write_trace(&given(path, "path")); });
}
ballast_status ballast_engine_config_json(ballast_engine* engine, const char** json) {
  return guarded([&] {
    given(json, "json");
    given(engine, "engine").json = engine->value.config().to_json();
    *json = engine->json.c_str();
  });
}

ballast_status ballast_engine_report(ballast_engine* engine, ballast_report* report) {
  static_assert(kLaneCount == BALLAST_LANE_COUNT);
  return guarded([&] {
    check_size(given(report, "report").struct_size, "report");
    Report& in = given(engine, "engine").report;
    in = engine->value.report();
    engine->device_memory = ranges_of(in.device_memory);
    engine->host_memory = ranges_of(in.host_memory);
    ballast_report out = {};
    out.parameters = in.parameters;
    out.world_size = in.world_size;
    out.rank = in.rank;
    out.threads = in.threads;
    out.zero_stage = in.zero_stage;
    out.device = in.device.c_str();
    out.timing = in.timing.c_str();
    out.placement = in.placement.c_str();
    out.io_backend = in.io_backend.c_str();
    out.io_backend_reason = in.io_backend_reason.c_str();
    out.resident_fraction = in.resident_fraction;
    out.nvme_stored_bytes = in.nvme_stored_bytes;
    for (int i = 0; i < kLaneCount; ++i) {
      const LaneReport& lane = in.lanes[static_cast<std::size_t>(i)];
      out.lanes[i] = {lane.bytes, lane.busy_ns, lane.tasks};
    }
    out.steps_updated = in.steps_updated;
    out.steps_discarded = in.steps_discarded;
    out.acquires = in.acquires;
    out.acquires_prefetched = in.acquires_prefetched;
    out.trace_repairs = in.trace_repairs;
    out.acquire_wait_ns = in.acquire_wait_ns;
    out.budget_device_bytes = in.budget_device_bytes;
    out.budget_host_bytes = in.budget_host_bytes;
    out.peak_device_bytes = in.peak_device_bytes;
    out.peak_host_bytes = in.peak_host_bytes;
    out.device_memory = engine->device_memory.data();
    out.device_memory_count = engine->device_memory.size();
    out.host_memory = engine->host_memory.data();
    out.host_memory_count = engine->host_memory.size();
    engine->nvme_files.clear();
    for (const std::string& file : in.nvme_files) engine->nvme_files.push_back(file.c_str());
    out.nvme_files = engine->nvme_files.data();
    out.nvme_file_count = engine->nvme_files.size();
    out.at_rest = in.at_rest ? 1 : 0;
    hand_out(out, report);
  });
}
