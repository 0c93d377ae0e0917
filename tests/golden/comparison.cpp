#include "comparison.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "unit_runner.h"

namespace spipe::test {
namespace {

double norm_of(const std::vector<double>& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }

// |x - ref| / |ref|
double relative_l2(std::span<const float> x, std::span<const float> reference) {
  std::vector<double> difference, size;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    difference.push_back(static_cast<double>(x[i]) - reference[i]);
    size.push_back(reference[i]);
  }
  return norm_of(difference) / norm_of(size);
}

double relative(double x, double reference) { return std::abs(x - reference) / std::abs(reference); }

double sum_of(std::span<const float> x) { return std::accumulate(x.begin(), x.end(), 0.0); }

class Comparer {
 public:
  Comparer(const GoldenModel& golden, const model::Architecture& architecture, const GoldenRun& run)
      : golden_(golden),
        run_(run),
        shape_(model::make_shape(
            architecture, {.micro = golden.sequences, .seq_len = golden.seq_len, .head_chunk = run.head_chunk}, run.compute)) {}

  Comparison compare() {
    for (const GoldenCase& c : golden_.cases) train(c);
    return std::move(result_);
  }

 private:
  void train(const GoldenCase& c);
  void compare_forward(UnitRunner& runner, std::size_t micro, std::vector<float>& nll);
  void compare_gradients(const UnitRunner& runner);
  void compare_updates(const UnitRunner& runner, const GoldenCase& c, const std::string& step, double lr_sum);

  const GoldenModel& golden_;
  const GoldenRun& run_;
  model::ModelShape shape_;
  Comparison result_;
};

void Comparer::train(const GoldenCase& c) {
  UnitRunner runner(shape_, *run_.ops);
  for (const auto& [name, values] : golden_.parameters) runner.set_parameter(name, values);
  double lr_sum = 0;
  for (std::size_t step = 0; step < c.steps.size(); ++step) {
    const GoldenStep& expected = c.steps[step];
    const double targets = golden_.targets_of(step);
    const bool initial = step == 0 && c.name == golden_.cases.front().name;  // initial weights: compare everything once
    double loss_sum = 0;
    std::vector<float> nll;
    for (std::size_t m = 0; m < static_cast<std::size_t>(golden_.micro); ++m) {
      const std::size_t at = step * static_cast<std::size_t>(golden_.micro) + m;
      runner.run_micro_batch(golden_.tokens[at], golden_.targets[at], static_cast<float>(1 / targets), m, m == 0);
      loss_sum += sum_of(runner.nll());
      if (initial) compare_forward(runner, m, nll);
    }
    if (initial) {
      result_.check("token losses", "", relative_l2(nll, golden_.reference.at("token_nll")), run_.tolerances.activations);
    }
    runner.finish_gradients();
    if (initial) compare_gradients(runner);
    const std::string where = c.name + " step " + std::to_string(step + 1);
    const double clip = std::min(1.0, c.max_grad_norm / (runner.global_norm() + 1e-6));
    result_.check("loss", where, relative(loss_sum / targets, expected.loss), run_.tolerances.loss);
    result_.check("gradient norm", where, relative(runner.global_norm(), expected.grad_norm), run_.tolerances.grad_norm);
    result_.check("clip coefficient", where, relative(clip, expected.clip_coef), run_.tolerances.grad_norm);
    runner.update({.lr = expected.lr,
                   .beta1 = c.beta1,
                   .beta2 = c.beta2,
                   .eps = c.eps,
                   .weight_decay = c.weight_decay,
                   .clip = clip,
                   .step = static_cast<int>(step) + 1});
    lr_sum += expected.lr;
    const int done = static_cast<int>(step) + 1;
    const bool saved = std::find(c.saved_steps.begin(), c.saved_steps.end(), done) != c.saved_steps.end();
    if (saved && run_.tolerances.updates) compare_updates(runner, c, "step" + std::to_string(done), lr_sum);
  }
}

void Comparer::compare_forward(UnitRunner& runner, std::size_t micro, std::vector<float>& nll) {
  nll.insert(nll.end(), runner.nll().begin(), runner.nll().end());
  result_.check("loss", "micro-batch " + std::to_string(micro), relative(sum_of(runner.nll()), golden_.loss_sums[micro]),
                run_.tolerances.loss);
  if (micro != 0) return;
  const auto hidden_size = static_cast<std::size_t>(shape_.architecture.hidden_size);
  const int layers = static_cast<int>(shape_.architecture.layers);
  for (int i = 0; i <= layers + 1; ++i) {
    const std::vector<float> all = i <= layers ? runner.boundary(i) : runner.final_norm();
    std::vector<float> picked;
    for (const std::int64_t row : golden_.positions) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(row) * hidden_size);
      picked.insert(picked.end(), begin, begin + static_cast<std::ptrdiff_t>(hidden_size));
    }
    const std::string name = "hidden." + std::to_string(i);
    result_.check("hidden", name, relative_l2(picked, golden_.reference.at(name)), run_.tolerances.activations);
  }
  std::vector<float> logits;
  for (const std::int64_t row : golden_.positions) {
    const std::vector<float> one = runner.logits(row);
    logits.insert(logits.end(), one.begin(), one.end());
  }
  result_.check("logits", "", relative_l2(logits, golden_.reference.at("logits")), run_.tolerances.activations);
}

void Comparer::compare_gradients(const UnitRunner& runner) {
  for (const auto& [name, gradient] : runner.gradients()) {
    const std::vector<float>& reference = golden_.reference.at("grad." + name);
    std::vector<double> difference, size;
    double dot = 0, squares = 0, largest_zero = 0;
    for (std::size_t i = 0; i < reference.size(); ++i) {
      const double x = gradient[i], r = reference[i];
      if (golden_.zero_gradient(name, i)) {
        largest_zero = std::max(largest_zero, std::abs(x));
        continue;
      }
      difference.push_back(x - r);
      size.push_back(r);
      dot += x * r;
      squares += x * x;
    }
    if (run_.tolerances.updates) result_.check("gradient that is zero", name, largest_zero, 1e-6);
    if (size.empty()) continue;
    result_.check("gradient", name, norm_of(difference) / norm_of(size), run_.tolerances.gradient);
    result_.check("gradient direction", name, 1 - dot / std::sqrt(squares) / norm_of(size), 1 - run_.tolerances.cosine);
  }
  result_.check("gradient norm", "", relative(runner.global_norm(), golden_.global_norm), run_.tolerances.grad_norm);
}

void Comparer::compare_updates(const UnitRunner& runner, const GoldenCase& c, const std::string& step, double lr_sum) {
  for (const auto& [name, start] : golden_.parameters) {
    const std::span<const float> trained = runner.parameter(name);
    const std::vector<float>& reference = golden_.reference.at(c.name + "." + step + "." + name);
    std::vector<double> difference, update;
    double largest_zero = 0;
    for (std::size_t i = 0; i < start.size(); ++i) {
      if (golden_.zero_gradient(name, i)) {
        largest_zero = std::max(largest_zero, std::abs(static_cast<double>(trained[i]) - start[i]));
        continue;
      }
      difference.push_back(static_cast<double>(trained[i]) - reference[i]);
      update.push_back(static_cast<double>(reference[i]) - start[i]);
    }
    const std::string where = c.name + " " + step + " " + name;
    result_.check("update without gradient / sum of rates", where, largest_zero / lr_sum, 1 + 1e-3);
    if (update.empty()) continue;
    const double tolerance = std::max(1e-3, 10 * c.update_error.at(step).at(name));
    result_.check("update", where, norm_of(difference) / norm_of(update), tolerance);
  }
}

}  // namespace

Tolerances float32_tolerances() {
  return {.loss = 2e-6, .grad_norm = 1e-5, .activations = 1e-5, .gradient = 2e-5, .cosine = 1 - 1e-9, .updates = true};
}

Tolerances bfloat16_tolerances(const model::Architecture& architecture) {
  const bool relu = architecture.mlp == model::MlpKind::relu;
  return {.loss = 3e-3,
          .grad_norm = 2e-2,
          .activations = 3e-2,
          .gradient = relu ? 0.3 : 0.06,
          .cosine = relu ? 0.97 : 0.995,
          .updates = false};
}

void Comparison::check(const std::string& quantity, const std::string& what, double error, double tolerance) {
  worst[quantity] = std::max(worst[quantity], error);
  if (error <= tolerance) return;  // false for NaN
  std::ostringstream line;
  line << quantity << " " << what << ": " << error << " > " << tolerance;
  failures.push_back(line.str());
}

std::string Comparison::text() const {
  std::ostringstream out;
  out.precision(2);
  for (const auto& [quantity, error] : worst) out << quantity << " " << error << ", ";
  for (const std::string& failure : failures) out << "\n  " << failure;
  return out.str();
}

Comparison compare_with_golden(const GoldenModel& golden, const model::Architecture& architecture, const GoldenRun& run) {
  return Comparer(golden, architecture, run).compare();
}

}  // namespace spipe::test
