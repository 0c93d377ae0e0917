// The direction of dependence between rooms, as the includes tell it.
#include <stdlib.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <stdexcept>

#include "scan.h"

namespace fs = std::filesystem;
using Problems = std::vector<std::string>;

namespace {

// A small tree in which plan, model and base are as they should be.
class FakeTree {
 public:
  FakeTree() {
    std::string name = (fs::temp_directory_path() / "spipe-includes-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    root_ = name;
    put("include/spipe/base/error.h", "#include <string>\n");
    put("include/spipe/model/architecture.h", "#include <vector>\n");
    put("include/spipe/model/shape.h", "#include \"spipe/base/error.h\"\n#include \"spipe/model/architecture.h\"\n");
    put("include/spipe/model/layers.h", "#include \"spipe/model/shape.h\"\n#include \"kernels/ops.h\"\n");
    put("include/spipe/plan/plan.h", "#include \"spipe/model/shape.h\"\n");
    put("include/spipe/io/checkpoint.h", "#include \"spipe/model/layers.h\"\n");
    put("kernels/ops.h", "#include \"spipe/base/error.h\"\n");
    put("src/plan/private.h", "");
    put("src/plan/plan.cpp", "#include \"spipe/plan/plan.h\"\n#include \"private.h\"\n#include <yaml.h>\n");
  }
  ~FakeTree() {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  FakeTree(const FakeTree&) = delete;
  FakeTree& operator=(const FakeTree&) = delete;
  void put(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  [[nodiscard]] Problems check() const { return includes::check_tree(root_); }

 private:
  fs::path root_;
};

}  // namespace

TEST_CASE("includes follow the arrows between rooms, without circles and without CUDA where it does not belong") {
  const Problems problems = includes::check_tree(".");
  for (const std::string& problem : problems) FAIL_CHECK(problem);
  CHECK(problems.empty());
  CHECK(includes::last_counts().files > 50);  // the working folder is the repository
  CHECK(includes::last_counts().own_includes > 100);
}

TEST_CASE("a tree as it should be has no problems") { CHECK(FakeTree().check().empty()); }

TEST_CASE("an arrow upwards is caught, in each way of writing it") {
  for (const char* line : {"#include \"spipe/io/checkpoint.h\"", "#include <spipe/io/checkpoint.h>",
                           "  #  include \"spipe/io/checkpoint.h\"", "#include \"../../include/spipe/io/checkpoint.h\""}) {
    INFO(line);
    const FakeTree tree;
    tree.put("src/plan/bad.cpp", std::string("// first\n") + line + "\n");
    const Problems problems = tree.check();
    REQUIRE(problems.size() == 1);
    CHECK_THAT(problems[0], Catch::StartsWith("src/plan/bad.cpp:2: plan must not include io ("));
  }
}

TEST_CASE("planning sees the shape of a model, nothing more of it") {
  const FakeTree tree;
  tree.put("src/plan/bad.cpp", "#include \"spipe/model/layers.h\"\n");
  CHECK(tree.check() == Problems{"src/plan/bad.cpp:1: plan must not include model (spipe/model/layers.h)"});
  tree.put("src/plan/bad.cpp", "#include \"kernels/ops.h\"\n");
  CHECK(tree.check() == Problems{"src/plan/bad.cpp:1: plan must not include kernels (kernels/ops.h)"});
  tree.put("src/plan/bad.cpp", "");
  tree.put("include/spipe/model/architecture.h", "#include \"kernels/ops.h\"\n");
  CHECK(tree.check() ==
        Problems{"include/spipe/model/architecture.h:1: the shape of a model must not include kernels (kernels/ops.h)"});
}

TEST_CASE("base includes nothing above it, and kernels nothing but base") {
  const FakeTree tree;
  tree.put("src/base/bad.cpp", "#include \"kernels/ops.h\"\n");
  tree.put("kernels/cpu/bad.cpp", "#include \"spipe/plan/plan.h\"\n");
  CHECK(tree.check() == Problems{"kernels/cpu/bad.cpp:1: kernels must not include plan (spipe/plan/plan.h)",
                                 "src/base/bad.cpp:1: base must not include kernels (kernels/ops.h)"});
}

TEST_CASE("private headers of another room, missing files and unknown rooms are caught") {
  const FakeTree tree;
  tree.put("tools/bad.cpp", "#include \"src/plan/private.h\"\n#include \"spipe/plan/gone.h\"\n");
  tree.put("src/shed/bad.cpp", "#include \"spipe/base/error.h\"\n");
  CHECK(tree.check() == Problems{"src/shed/bad.cpp:1: room shed is not in the table of arrows (spipe/base/error.h)",
                                 "tools/bad.cpp:1: tools must not include a private header of plan (src/plan/private.h)",
                                 "tools/bad.cpp:2: no such file: spipe/plan/gone.h"});
}

TEST_CASE("CUDA headers are caught outside their folders and allowed inside") {
  const FakeTree tree;
  for (const char* place : {"src/device/cuda/stream.cpp", "kernels/cuda/matmul.cu", "src/comm/nccl_group.cpp"}) {
    tree.put(place, "#include <cuda_runtime.h>\n#include <nccl.h>\n");
  }
  CHECK(tree.check().empty());
  tree.put("src/device/device.cpp", "#include <string>\n#include <cuda_runtime.h>\n");
  tree.put("src/comm/world.cpp", "#include <nccl.h>\n");
  const std::string why = "a CUDA header outside device/cuda, kernels/cuda and comm's NCCL file: ";
  CHECK(tree.check() ==
        Problems{"src/comm/world.cpp:1: " + why + "nccl.h", "src/device/device.cpp:2: " + why + "cuda_runtime.h"});
}

TEST_CASE("a circle of headers is caught and shown") {
  const FakeTree tree;
  tree.put("include/spipe/plan/a.h", "#include \"spipe/plan/b.h\"\n");
  tree.put("include/spipe/plan/b.h", "#include \"spipe/plan/c.h\"\n");
  tree.put("include/spipe/plan/c.h", "#include \"spipe/plan/a.h\"\n");
  CHECK(tree.check() ==
        Problems{"circle of includes: include/spipe/plan/a.h -> include/spipe/plan/b.h -> include/spipe/plan/c.h -> "
                 "include/spipe/plan/a.h"});
}
